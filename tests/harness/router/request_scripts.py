"""What mostly happens to requests, and what may happen besides, for scripts of `request_scene`."""

from __future__ import annotations

from hypothesis import strategies as st
from request_scene import Steps
from scripted_dispatcher import EOS, TEXT, VOCAB

TALK = [{"role": "user", "content": "hi"}]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
LETTERS = TEXT.encode("stop this, \u00e9\u4e16 \U0001f642 END", add_special_tokens=False).tolist()
TOKENS = st.lists(
    st.one_of(st.sampled_from(LETTERS), st.integers(0, VOCAB - 1), st.just(EOS)), min_size=1, max_size=3
).map(tuple)

LOCAL: Steps = [("scheduled", 2, ()), *[("row", 0, (letter,)) for letter in LETTERS[:5]], ("finished", 0, ())]
# Whose node only says at the end what it had cached.
UNANNOUNCED: Steps = [*LOCAL[1:-1], ("finished", 2, ())]
REMOTE: Steps = [
    ("scheduled", 2, ()), ("reserved", 0, ()), ("token", 0, (LETTERS[0],)), ("again", 0, (LETTERS[0],)), ("delivered",
    2, ()),
    *[("row", 0, (letter,)) for letter in LETTERS[1:5]], ("finished", 0, ()),
]  # fmt: skip
LATE: Steps = [
    ("token", 0, (LETTERS[0],)), ("reserved", 0, ()), ("scheduled", 2, ()), ("delivered", 2, ()), ("row", 0,
    (LETTERS[1],)), ("finished", 0, ()),
]  # fmt: skip
# Whose first token is the decode node's.
COMPUTED: Steps = [
    ("scheduled", 2, ()), ("reserved", 0, ()), ("computed", 2, ()), *[("row", 0, (letter,)) for letter in LETTERS[:2]],
    ("delivered", 2, ()), *[("row", 0, (letter,)) for letter in LETTERS[2:5]], ("finished", 0, ()),
]  # fmt: skip
EARLY_END: Steps = [("scheduled", 2, ()), ("token", 0, (LETTERS[0],)), ("ended early", 2, ())]
USUAL: dict[str, list[Steps]] = {
    "one node": [LOCAL, UNANNOUNCED],
    "two nodes": [LOCAL],
    "a pair": [REMOTE, LATE, COMPUTED, EARLY_END],
    "no slack": [REMOTE, COMPUTED, EARLY_END],
    "two pairs": [REMOTE, COMPUTED, EARLY_END],
}

HAPPENS = (
    "ahead", "again", "early", "empty", "wrong token", "stranger", "refused", "failed", "lost", "rewelcomed", "dead",
    "deaf", "hears",
    "pause", "resume", "gone", "stopping", "cancelled", "aborted", "time", "row", "scheduled", "computed", "token", "reserved", "delivered",
    "finished", "ended early",
)  # fmt: skip
ONE = st.tuples(st.sampled_from(HAPPENS), st.integers(0, 11), TOKENS)

FIELDS = st.sampled_from(
    [
        {"prompt": PROMPT, "max_tokens": 20, "temperature": 0},
        {"prompt": "hello world", "ignore_eos": True, "prompt_cache_key": "talk"},
        {"prompt": PROMPT, "stop_token_ids": [LETTERS[0]], "skip_special_tokens": False},
        {"prompt": PROMPT, "stream": True},
        {"messages": TALK, "max_tokens": 30},
        {"prompt": PROMPT, "echo": True},
        {"prompt": PROMPT, "echo": True, "max_tokens": 0},
        {
            "messages": TALK,
            "stream": True,
            "stream_options": {"include_usage": True},
            "pdcluster_mode": "auto",
            "priority": 3,
        },
        {"messages": TALK, "stream": True, "return_token_ids": True, "stop": ["t"]},
        {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"messages": TALK, "stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"prompt": "hello", "stream": True, "stop_token_ids": LETTERS[:1], "stream_options": {"include_usage": True}},
        {"prompt": PROMPT[:1], "frequency_penalty": 0.5, "top_k": 3, "top_p": 0.5, "min_tokens": 1, "n": 1},
    ]
)
