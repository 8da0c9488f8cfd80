"""Cards of made-up nodes."""

from typing import Any

from pdcluster.bootstrap.card import Adapter, Capabilities, NodeCard
from pdcluster.kv.layout import Fingerprint, KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, page_tokens=32, dtype="float32")
FINGERPRINT = Fingerprint("tiny", "sha-1", 1, 32, LAYOUT)
# Of a node whose engine differs from ours in all that a card says.
OTHER_ENGINE = Fingerprint("tiny", "sha-1", 1, 32, LAYOUT, engine="vllm")
ALL_OTHER = Capabilities(
    pulls=False, parks_s=25.0, digests=False, keyed_sampling=False, estimated_cost=True, first_token="decode",
    embeds=True, adapters=16,
)  # fmt: skip
ADAPTERS = (Adapter("sql", "d1"), Adapter("sums", "d2"))


def make_card(node: str = "prefill-0", incarnation: str = "boot-1", **changes: Any) -> NodeCard:
    fields: dict[str, Any] = {
        "role": "prefill", "address": "127.0.0.1:4000", "model": "tiny", "fingerprint": FINGERPRINT, "max_len": 2048,
        "vocab_size": 1000,
        "num_pages": 64, "eos_ids": (2, 3), "tokenizer_hash": "abc", "backends": ("shm", "tcp"), "pid": 42,
    }  # fmt: skip
    return NodeCard(node, incarnation, **(fields | changes))
