"""The formulas of `seconds`: the terms of one node for one request, all in seconds.

Plain functions over rows of numbers (`stations`), written so that numba compiles them as they stand: loops, ifs and
floats, no objects. `compiled` has them compiled where it can; else, and in tests, they run as the Python that they are,
with the same floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

# Share of a prompt's last chunk whose KV leaves after the first token, about: layers go in groups while the later ones
# are computed.
LAST_GROUP = 0.25

# Bandwidth of a pair that has not moved anything yet.
UNMEASURED_BYTES_S = 1e9

# Commit, its check and the acknowledgement.
HANDOVER_S = 1e-3

# Times what a row alone takes from token to token, up to which rows are well served (DESIGN §11).
COMFORT = 2.0

# How much more a second weighs for each time that a pace is beyond that.
STRAIN = 5.0

# Times what a prompt takes alone, short ones given the time of a usual one, within which its first token is in time
# (DESIGN §11).
PATIENCE = 5.0

# Standard deviations by which a row may be slower than the mean of all. Prompts come beside it by chance, each with a
# pause about as long as that of the one that is asked about: while there are few, as a Poisson process; the less time
# there is without one, the less is left to chance.
CHANCE = 1.0

# Of what rows may take on average from token to token, as long as some of them take more.
WELL = 0.9

# Where answers are short, or rows are asked to be as fast as alone, any pause would weigh as much as it pleases, and
# prompts wait for long instead: by replays of short answers, whose first tokens came 9 % later with 100 than without
# any of it, and 5 % with this.
MOST_PAUSE_WEIGHT = 4.0

# Of the seconds that a copy of cached tokens would take to compute: what others lose by the room that it takes, in
# which prefixes were that no other node holds. By replays of long documents that are asked about again, in caches of a
# third of them: with 0.5 and 1.0 first tokens come 23 and 28 % sooner than with 0.
COPY_WEIGHT = 1.0

# Of what prompts could have had cached (`lost_prefixes`): from there on a copy costs that much. Where nothing is lost
# it costs nothing: agents at half load, whose prefixes all fit, would wait 10 % longer.
MUCH_LOST = 0.1

ROUNDING = 1e-9
# Stands where zero would be divided by.
TINY = 1e-300

PREFILL_TERMS = ("wait", "compute", "fetch", "price", "slowed", "copy")
DECODE_TERMS = ("room", "exposed", "decode", "others", "row_price", "copy")
LOCAL_TERMS = (*PREFILL_TERMS, "room", "decode", "others", "row_price")

Numbers = Sequence[float]
# What holds for all nodes at one moment: the price, seconds that later prompts lose for each second of work; and of the
# time in which prompts are computed, the share on a node that does so for others, and on a decode node.
Market = tuple[float, float, float]

# Columns of a table of nodes: the fields of `stations.Station`, in their order. What they follow from stands behind
# them (`settling`).
(
    IS_SERVER,
    NUM_PROMPTS,
    NUM_REQUESTS,
    WAIT_S,
    BACKLOG_S,
    STRETCH,
    PROMPT_FIXED_S,
    TOKEN_S,
    PAIR_S,
    CHUNK_TOKENS,
    DECODE_FIXED_S,
    EACH_ROW_S,
    CONTEXT_S,
    ROWS,
    CONTEXT_TOKENS,
    ADDED_S,
    TPOT_S,
    ITL_S,
    PROMPT_STEP_S,
    MISSING_ROWS,
    TIGHT,
    SPARE_PAGES,
    BLOCK_TOKENS,
    KV_BYTES,
    DOUBT,
) = range(25)
NUM_STATION = 25

# What is asked of each node: the request, the policy's own numbers, and what the router knows beside the nodes
# (`base.Query`). PREVIOUS: the mode of the last choice: 1 local, 2 remote, 0 none. LOST: share of what could have been
# cached.
(
    NUM_TOKENS,
    OUTPUT,
    ITL_ASKED_S,
    NUM_HELD,
    USUAL_TOKENS,
    BUSY_SERVING,
    BUSY_DECODING,
    PREVIOUS,
    LOST,
    ALPHA,
    HARM,
    MARGIN,
    GAP,
) = range(13)
NUM_ASKED = 13

# ---------------------------------------------------------------- one node


def alone_s(node: Numbers, new: float, cached: float) -> float:
    """Computing so many tokens behind cached ones, with nothing beside them; 0 for none."""
    if new <= 0.0:
        return 0.0
    steps = new / node[CHUNK_TOKENS]
    if steps < 1.0:
        steps = 1.0
    return node[PROMPT_FIXED_S] * steps + node[TOKEN_S] * new + node[PAIR_S] * (new * (cached + new / 2))


def gap_s(node: Numbers, new: float, cached: float) -> float:
    """The longest pause between tokens of running rows while `new` tokens of a prompt are computed."""
    chunk = node[CHUNK_TOKENS]
    if new < chunk:
        chunk = new
    return alone_s(node, chunk, cached + new - chunk) + node[ADDED_S]


def paced_s(node: Numbers, new: float, cached: float, output: float) -> float:
    """Between tokens of the rows that run there, over an answer: as it was lately, but for the steps in which this
    prompt is computed beside them, and what waits before it; and slower by CHANCE, which few long pauses leave more
    room to than many short ones, and a node that always computes prompts none: no row is slower than all of its
    steps."""
    steps = max(new / node[CHUNK_TOKENS], 1.0)
    busy_s = max(alone_s(node, new, cached) / steps, node[DECODE_FIXED_S]) + node[ADDED_S]
    share = min((node[WAIT_S] / max(node[PROMPT_STEP_S], busy_s, TINY) + steps) / output, 1.0)
    mean_s = (1.0 - share) * node[ITL_S] + share * busy_s
    most_s, slower_s = max(busy_s - node[TPOT_S], 0.0), max(mean_s - node[TPOT_S], 0.0)
    if slower_s >= most_s:
        return mean_s
    pause_s, free = min(steps / output, 1.0) * most_s, 1.0 - slower_s / most_s
    return min(mean_s + CHANCE * sqrt(slower_s * pause_s * free), busy_s)


def comfort_s(node: Numbers, itl_s: float) -> float:
    """What rows that run there, or will, may take from token to token: as asked, or COMFORT times what one of them
    takes alone."""
    if itl_s > 0.0:
        return itl_s
    each_s = node[ADDED_S] / node[ROWS] if node[ROWS] > 0.0 else node[EACH_ROW_S]
    return COMFORT * (node[DECODE_FIXED_S] + each_s)


def num_slowed(node: Numbers) -> float:
    """Rows that a prompt there slows. Those of a decode node's prompts are its own."""
    return node[ROWS] if node[IS_SERVER] > 0.0 else node[ROWS] + node[NUM_PROMPTS]


def keeps_pace(node: Numbers, cached: float, asked: Numbers) -> bool:
    """Whether running rows wait no longer for a token than they may, once and on average, while the prompt is computed
    there."""
    if num_slowed(node) == 0.0:
        return True
    new, itl_s = asked[NUM_TOKENS] - cached, asked[ITL_ASKED_S]
    limit_s = itl_s if itl_s > 0.0 else asked[GAP] * node[TPOT_S]
    if gap_s(node, new, cached) > limit_s:
        return False
    return paced_s(node, max(new, 1.0), cached, asked[OUTPUT]) <= WELL * comfort_s(node, itl_s)


def bears(node: Numbers, cached: float, asked: Numbers, most: float) -> bool:
    """Whether the node holds up no running rows for long by the prompt, or at most so many."""
    return num_slowed(node) <= most or keeps_pace(node, cached, asked)


def computed(node: Numbers, known: float, asked: Numbers) -> tuple[float, float]:
    """Seconds of computing what is not known there, and what each row that runs there loses meanwhile. At least one
    token is always computed: the first output token is drawn from its logits."""
    new = asked[NUM_TOKENS] - known
    if new < 1.0:
        new = 1.0
    steps = new / node[CHUNK_TOKENS]
    if steps < 1.0:
        steps = 1.0
    work_s = node[PROMPT_FIXED_S] * steps + node[TOKEN_S] * new + node[PAIR_S] * (new * (known + new / 2))
    paused_s = work_s - steps * node[DECODE_FIXED_S]
    return work_s * node[STRETCH], paused_s if paused_s > 0.0 else 0.0


def copy_s(node: Numbers, cached: float, kept: float, asked: Numbers) -> float:
    """What others lose when this node, too, holds tokens of the prompt beyond those it has `cached`, up to those that
    another one keeps: COPY_WEIGHT of what the node would save with them, which is less than the whole prompt, since one
    token is always computed. On a decode node nothing: rows that come there bring their KV wherever their prompts are
    computed."""
    if kept <= cached or node[IS_SERVER] <= 0.0 or asked[LOST] <= 0.0:
        return 0.0
    scarcity = min(asked[LOST] / MUCH_LOST, 1.0)
    return COPY_WEIGHT * scarcity * (computed(node, cached, asked)[0] - computed(node, kept, asked)[0])


def prompt_on(
    node: Numbers, cached: float, held: float, bytes_s: float, asked: Numbers
) -> tuple[float, float, float, float]:
    """How the node would come by the prompt's KV: by a copy of the `held` tokens that another node has, which comes
    while this one's queue is worked off, where that is sooner than by its own cache. Seconds of fetching that the queue
    does not hide, of computing the rest, what rows lose meanwhile, and whether it fetches. bytes_s: of the path; 0 for
    none."""
    compute_s, paused_s = computed(node, cached, asked)
    if bytes_s > 0.0 and held > cached:
        fetch_s = HANDOVER_S + (held - cached) * node[KV_BYTES] / bytes_s - node[WAIT_S]
        if fetch_s < 0.0:
            fetch_s = 0.0
        if fetch_s < compute_s:
            rest_s, rest_paused_s = computed(node, held, asked)
            if fetch_s + rest_s < compute_s:
                return fetch_s, rest_s, rest_paused_s, 1.0
    return 0.0, compute_s, paused_s, 0.0


def beside_prompts_s(node: Numbers, quiet_s: float, busy_s: float, share: float, output: float) -> float:
    """Between tokens of a row with prompts beside it for that share of the time, or while what waits now is computed,
    whichever makes it slower. On a node that computes prompts for others more will follow, so that the wait is a share
    of the row's time as well. On a decode node it is over once, however long its steps are: rows lose that, not their
    whole pace."""
    wait_s, once_s = node[WAIT_S], 0.0
    if wait_s > 0.0 and node[IS_SERVER] > 0.0:
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


def row_on(
    node: Numbers, cached: float, asked: Numbers, market: Market
) -> tuple[float, float, float, float, float, float]:
    """A row beside those that run, with prompts beside it for the market's share of the time, and while what waits now
    is computed. Its pace; strain: how much more a second weighs there, because rows are slower than is comfortable;
    then room, decode, others (what the running rows lose by one more beside them) and row_price (the row's share of the
    steps that compute prompts, priced)."""
    output, is_server = asked[OUTPUT], node[IS_SERVER]
    row_s = node[EACH_ROW_S] + node[CONTEXT_S] * (asked[NUM_TOKENS] + output / 2)
    quiet_s, busy_s = node[TPOT_S] + row_s, node[PROMPT_STEP_S] + row_s
    price, serving_share, local_share = market
    share = serving_share if is_server > 0.0 else local_share
    tpot_s = beside_prompts_s(node, quiet_s, busy_s, share, output)
    limit_s = asked[ITL_ASKED_S]
    if limit_s <= 0.0:
        limit_s = COMFORT * (node[DECODE_FIXED_S] + row_s)
    beyond = tpot_s / (limit_s if limit_s > 0.0 else TINY) - 1.0
    strain = 1.0 + STRAIN * beyond if beyond > 0.0 else 1.0
    missing_pages = (asked[NUM_TOKENS] - cached + output) / node[BLOCK_TOKENS] - node[SPARE_PAGES]
    if missing_pages < 0.0:
        missing_pages = 0.0
    strained = strain * output
    return (
        tpot_s,
        strain,
        output * tpot_s * (node[MISSING_ROWS] + missing_pages * node[TIGHT]),
        strained * tpot_s,
        strained * row_s * node[ROWS],
        is_server * price * share * output * row_s,
    )


def slowness(node: Numbers, tpot_s: float, asked: Numbers) -> float:
    """Of rows on a node: 0 when each is as fast as alone, 1 when they are as slow as they may be."""
    lone_s = alone_row_s(node, asked)
    slower_s = tpot_s - lone_s
    return slower_s / bearable_s(lone_s, asked) if slower_s > ROUNDING * tpot_s else 0.0


def pause_weight(node: Numbers, late: float, asked: Numbers) -> float:
    """What a second weighs by which a row of a decode node is held up, beside one for which a first token is waited: as
    many times more as a row has less to lose over an answer until it is slow than a prompt has until it is late, if
    any, and no more than MOST_PAUSE_WEIGHT. late: how near prompts are to that; the nearer, the more does their time
    weigh, too, by replays of generated mixes with the second power. On a node that computes prompts for others it is 1:
    they have to be computed beside somebody's rows."""
    patience_s = PATIENCE * alone_s(node, max(asked[NUM_TOKENS], asked[USUAL_TOKENS]), 0.0)
    weight = patience_s / (asked[OUTPUT] * bearable_s(alone_row_s(node, asked), asked))
    if node[IS_SERVER] > 0.0 or weight <= 1.0 or late >= 1.0:
        return 1.0
    return 1.0 + (1.0 - late) * (1.0 - late) * (min(weight, MOST_PAUSE_WEIGHT) - 1.0)


def alone_row_s(node: Numbers, asked: Numbers) -> float:
    """From token to token of a row with nothing beside it."""
    return node[DECODE_FIXED_S] + node[EACH_ROW_S] + node[CONTEXT_S] * (asked[NUM_TOKENS] + asked[OUTPUT] / 2)


def bearable_s(lone_s: float, asked: Numbers) -> float:
    """By how much a row may be slower than alone."""
    limit_s = asked[ITL_ASKED_S] if asked[ITL_ASKED_S] > 0.0 else COMFORT * lone_s
    return max(limit_s - lone_s, TINY)
