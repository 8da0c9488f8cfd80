"""Derived node state: the last load report plus the work sent since. One source for compiled code and plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from pdcluster_router.policy.predicted.records import NodeRow

# Pages are scarce while fewer than one of so many is left.
SCARCE = 4.0


def derive(node: NodeRow) -> None:
    """Write the fields that follow from the report, the step costs and the work sent since."""
    tokens, pairs = node.reported_tokens + node.sent_tokens, node.reported_pairs + node.sent_pairs
    rows, context = node.reported_rows + node.sent_rows, node.reported_context + node.sent_context
    requests = node.reported_requests + node.sent_requests
    node.num_prompts = node.reported_prompts + node.sent_prompts + (1.0 if tokens > 0.0 else 0.0)
    node.num_requests = node.in_flight if node.in_flight > requests else requests
    node.rows, node.context_tokens = rows, context
    derive_room(node)
    chunk = node.chunk_tokens if node.chunk_tokens < inf else 0.0
    added_s = node.each_row_s * rows + node.context_s * context
    backlog_s = step_s = 0.0
    if chunk > 0.0:
        step_s = (
            node.prompt_fixed_s + node.token_s * chunk + node.pair_s * (chunk * depth_of(node, tokens, pairs, chunk))
        )
    if tokens > 0.0:
        steps = tokens / chunk if tokens > chunk and chunk > 0.0 else 1.0
        backlog_s = node.prompt_fixed_s * steps + node.token_s * tokens + node.pair_s * pairs
    tpot_s = node.decode_fixed_s + added_s
    node.stretch = 1.0 + added_s / step_s if step_s > 0.0 else 1.0
    node.wait_s, node.backlog_s, node.added_s, node.tpot_s = backlog_s * node.stretch, backlog_s, added_s, tpot_s
    node.itl_s = node.reported_itl_s if rows > 0.0 and node.reported_itl_s > tpot_s else tpot_s
    node.prompt_step_s = (step_s if step_s > node.decode_fixed_s else node.decode_fixed_s) + added_s


def depth_of(node: NodeRow, tokens: float, pairs: float, chunk: float) -> float:
    """Tokens that a token of a chunk attends to: as the waiting prompts do, else as prompts as long as the contexts."""
    depth = 0.0
    if tokens > 0.0:
        depth = pairs / tokens
    elif node.rows > 0.0:
        depth = node.context_tokens / node.rows / 2.0
    return depth if depth > chunk / 2.0 else chunk / 2.0


def derive_room(node: NodeRow) -> None:
    """Rows that are too many for the node's slots, and pages that rows could still have."""
    node.missing_rows = node.spare_pages = node.tight = 0.0
    if node.has_load == 0.0:
        return
    missing = node.slots_used + node.sent_rows - node.slots + 1.0
    if missing > 0.0 and node.slots != 0.0:
        node.missing_rows = missing / node.slots
    node.spare_pages = node.pages_left - node.sent_context / node.block_tokens
    if node.pages_left < node.pages // SCARCE:
        held = node.pages - node.pages_left
        node.tight = 1.0 / (held if held > 1.0 else 1.0)


def note_sent(nodes: Sequence[NodeRow], in_flight: int, sent: tuple[int, int, int, int, int, int]) -> None:
    """Write what this router now has in flight on the one node: requests, and the fields of `InFlightWork`."""
    node = nodes[0]
    node.in_flight = in_flight
    node.sent_requests, node.sent_tokens, node.sent_pairs = sent[0], sent[1], sent[2]
    node.sent_rows, node.sent_context, node.sent_prompts = sent[3], sent[4], sent[5]
    derive(node)
