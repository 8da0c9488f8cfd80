"""The formulas of the policy `seconds`: the terms of one node for one request, in seconds.

They are plain functions over records (`records`), written for numba: loops, ifs and floats, no objects. `compiled`
compiles them where it can. Otherwise they run as Python, with the same floats.
"""

from __future__ import annotations

from math import sqrt

from pdcluster_router.core.node_row import NodeRow, alone_s
from pdcluster_router.core.room import COMFORT
from pdcluster_router.policy.predicted.records import ChoiceRow, RequestRow

# Share of a prompt's last chunk whose KV leaves after the first token. Layers leave in groups while later ones are
# computed.
LAST_GROUP = 0.25

# Bandwidth assumed for a pair that has moved nothing yet.
UNMEASURED_BYTES_S = 1e9

# Commit, its check and the acknowledgement.
HANDOVER_S = 1e-3

# Standard deviations by which a row may be slower than the mean. Prompts come beside it by chance, as a Poisson process
# while they are few. The less time without prompts, the less is left to chance.
CHANCE = 1.0

# Share of the limit that rows may take on average while some take more.
WELL = 0.9

# Price of a copy of cached tokens, as a share of computing them: it takes the room of prefixes that no other node
# holds. Long documents in small caches had first tokens 23 and 28 % sooner with 0.5 and 1.0 than with 0.
COPY_WEIGHT = 1.0

# From this share of lost prefixes on, a copy costs its full price. Where nothing is lost it costs nothing: agents whose
# prefixes all fit would wait 10 % longer.
MUCH_LOST = 0.1

# Stands in for a zero divisor.
TINY = 1e-300


def gap_s(node: NodeRow, new: float, cached: float) -> float:
    """The longest gap between tokens of running rows while `new` prompt tokens are computed."""
    chunk = node.chunk_tokens
    if new < chunk:
        chunk = new
    return alone_s(node, chunk, cached + new - chunk) + node.added_s


def paced_s(node: NodeRow, new: float, cached: float, output: float) -> float:
    """Seconds between tokens of the node's rows, over an answer.

    It takes the recent gap, adds the steps of this prompt and of waiting prompts, and adds CHANCE. A few long pauses
    leave more to chance than many short ones. A node that always computes prompts leaves none: no row is slower than
    all its steps.
    """
    steps = max(new / node.chunk_tokens, 1.0)
    busy_s = max(alone_s(node, new, cached) / steps, node.decode_fixed_s) + node.added_s
    share = min((node.wait_s / max(node.prompt_step_s, busy_s, TINY) + steps) / output, 1.0)
    mean_s = (1.0 - share) * node.itl_s + share * busy_s
    most_s, slower_s = max(busy_s - node.tpot_s, 0.0), max(mean_s - node.tpot_s, 0.0)
    if slower_s >= most_s:
        return mean_s
    pause_s, free = min(steps / output, 1.0) * most_s, 1.0 - slower_s / most_s
    return min(mean_s + CHANCE * sqrt(slower_s * pause_s * free), busy_s)


def comfort_s(node: NodeRow, itl_s: float) -> float:
    """What rows on the node may take between tokens: as required, or COMFORT times a lone row's time."""
    if itl_s > 0.0:
        return itl_s
    each_s = node.added_s / node.rows if node.rows > 0.0 else node.each_row_s
    return COMFORT * (node.decode_fixed_s + each_s)


def num_slowed(node: NodeRow) -> float:
    """Rows that a prompt slows. A decode node's own prompts slow its own rows."""
    return node.rows if node.is_server > 0.0 else node.rows + node.num_prompts


def keeps_pace(node: NodeRow, cached: float, asked: RequestRow) -> bool:
    """Whether running rows stay within their limit, once and on average, while the prompt is computed."""
    if num_slowed(node) == 0.0:
        return True
    new = asked.num_tokens - cached
    if 0.0 < asked.itl_s < gap_s(node, new, cached):
        return False
    return paced_s(node, max(new, 1.0), cached, asked.output) <= WELL * comfort_s(node, asked.itl_s)


def bears(node: NodeRow, cached: float, asked: RequestRow, most: float) -> bool:
    """Whether the prompt holds up no running rows for long, or at most `most` of them."""
    return num_slowed(node) <= most or keeps_pace(node, cached, asked)


def computed(node: NodeRow, known: float, asked: RequestRow) -> tuple[float, float]:
    """Seconds to compute what is not cached, and what each running row loses meanwhile.

    At least one token is computed, for the logits of the first output token.
    """
    new = max(asked.num_tokens - known, 1.0)
    work_s = alone_s(node, new, known)
    return work_s * node.stretch, max(work_s - max(new / node.chunk_tokens, 1.0) * node.decode_fixed_s, 0.0)


def copy_s(node: NodeRow, cached: float, kept: float, asked: RequestRow) -> float:
    """What others lose when this node also holds tokens that another one keeps.

    COPY_WEIGHT of what the node would save with them. Zero on a decode node: its rows bring their KV anyway.
    """
    if kept <= cached or node.is_server <= 0.0 or asked.lost <= 0.0:
        return 0.0
    scarcity = min(asked.lost / MUCH_LOST, 1.0)
    return COPY_WEIGHT * scarcity * (computed(node, cached, asked)[0] - computed(node, kept, asked)[0])


def prompt_on(
    node: NodeRow, cached: float, held: float, bytes_s: float, asked: RequestRow
) -> tuple[float, float, float, int]:
    """How the node gets the prompt's KV: a fetch of the `held` tokens, where that is sooner than its own cache.

    Returns seconds of fetching that the queue does not hide, seconds of computing, what rows lose meanwhile, and
    whether it fetches. bytes_s: of the path; 0 for none.
    """
    compute_s, paused_s = computed(node, cached, asked)
    if bytes_s > 0.0 and held > cached:
        fetch_s = HANDOVER_S + (held - cached) * node.kv_bytes / bytes_s - node.wait_s
        if fetch_s < 0.0:
            fetch_s = 0.0
        if fetch_s < compute_s:
            rest_s, rest_paused_s = computed(node, held, asked)
            if fetch_s + rest_s < compute_s:
                return fetch_s, rest_s, rest_paused_s, 1
    return 0.0, compute_s, paused_s, 0


def beside_prompts_s(node: NodeRow, quiet_s: float, busy_s: float, share: float, output: float) -> float:
    """Seconds between tokens of a row with prompts beside it, for that share of time or while the waiting ones are
    computed, whichever is slower.

    On a serving node more prompts will follow, so waiting work is also a share of the row's time. On a decode node it
    is over once, and rows lose only that.
    """
    wait_s, once_s = node.wait_s, 0.0
    if wait_s > 0.0 and node.is_server > 0.0:
        life_s = output * quiet_s
        waits = wait_s / (life_s if life_s > 1e-9 else 1e-9)
        if waits > 1.0:
            waits = 1.0
        if waits > share:
            share = waits
    elif wait_s > 0.0 and quiet_s > TINY:
        steps = wait_s / busy_s
        once_s = busy_s if steps > output else quiet_s + (busy_s - quiet_s) * (steps / output)
    mean_s = (1.0 - share) * busy_s + share * quiet_s
    lasting_s = quiet_s * busy_s / (mean_s if mean_s > TINY else TINY)
    return once_s if once_s > lasting_s else lasting_s


def row_on(node: NodeRow, cached: float, asked: RequestRow, choice: ChoiceRow) -> tuple[float, float, float, float]:
    """A new row beside the running ones, with prompts beside it.

    Returns its pace; then room, decode and others (what running rows lose by one more).
    """
    output = asked.output
    row_s = node.each_row_s + node.context_s * (asked.num_tokens + output / 2)
    share = choice.share if node.is_server > 0.0 else choice.local_share
    tpot_s = beside_prompts_s(node, node.tpot_s + row_s, node.prompt_step_s + row_s, share, output)
    missing_pages = max((asked.num_tokens - cached + output) / node.block_tokens - node.spare_pages, 0.0)
    room_s = output * tpot_s * (node.missing_rows + missing_pages * node.tight)
    return tpot_s, room_s, output * tpot_s, output * row_s * node.rows
