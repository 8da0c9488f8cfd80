"""Records of a choice: what it depends on besides the nodes, its result, and its candidates. Values only."""

from __future__ import annotations

from pdcluster_router.core.node_row import NumberRecord, dtype_of

# The best candidates of a leg that are kept.
MOST_CANDIDATES = 16

# ChoiceRow.mode and RequestRow.previous.
NO_MODE, LOCAL, REMOTE = 0, 1, 2
MODES = {None: NO_MODE, "local": LOCAL, "remote": REMOTE}

# CandidateRow.leg.
PREFILL_LEG, DECODE_LEG, LOCAL_LEG = 0, 1, 2

NOWHERE = -1


class RequestRow(NumberRecord):
    """What a choice depends on besides the nodes: see `Query`, and `Seconds` for the last three."""

    num_tokens: float
    output: float
    itl_s: float
    num_held: float
    busy_serving: float
    busy_decoding: float
    previous: int
    lost: float
    # The node from which KV may be fetched (NOWHERE: none), and the tokens that it holds.
    source: int
    held: float
    # Mode local is compared though a pair is possible.
    wants_local: int
    # Of KV that is computed already: tokens of a chunk that it leaves in.
    parked_chunk: float
    alpha: float
    harm: float
    margin: float


class ChoiceRow(NumberRecord):
    """A choice.

    prefill: NOWHERE in mode local. skipped: better prefill nodes without a partner. bearable: rows that a local node
    may hold up for long, -1 for none. is_calm: 0 where every local node holds up too many.

    price: seconds that later prompts lose per second of work. share, local_share: of the time, with prompts on a
    serving node and on a decode node.

    work_s: of the computing node. estimate_s: until the first token there, by what waits and its own prompt. best,
    best_s: who else is estimated to be soonest, NOWHERE for nobody.
    """

    mode: int
    prefill: int
    decode: int
    ttft_s: float
    tpot_s: float
    is_fetched: int
    skipped: int
    bearable: float
    is_calm: int
    price: float
    share: float
    local_share: float
    num_prefill: int
    num_decode: int
    num_local: int
    work_s: float
    estimate_s: float
    best: int
    best_s: float


class CandidateRow(NumberRecord):
    """A node for one leg. estimate_s: see ChoiceRow; -1 for none. The fields of its leg in TERMS add up to its cost."""

    leg: int
    row: int
    cached: float
    cost: float
    is_fetched: int
    estimate_s: float
    spread: float
    doubt: float
    wait_s: float = 0.0
    compute_s: float = 0.0
    fetch_s: float = 0.0
    price_s: float = 0.0
    slowed_s: float = 0.0
    copy_s: float = 0.0
    room_s: float = 0.0
    exposed_s: float = 0.0
    decode_s: float = 0.0
    others_s: float = 0.0


# The terms of a cost, by leg. Explanations name them so, without the unit.
PREFILL_TERMS = "wait_s", "compute_s", "fetch_s", "price_s", "slowed_s", "copy_s"
TERMS = (
    PREFILL_TERMS,
    ("room_s", "exposed_s", "decode_s", "others_s", "copy_s"),
    (*PREFILL_TERMS, "room_s", "decode_s", "others_s"),
)


for _kind in (RequestRow, ChoiceRow, CandidateRow):
    _kind.dtype = dtype_of(_kind)
