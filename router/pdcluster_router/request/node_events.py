"""What each message of a node leads to, and what an attempt sends to nodes.

One function per event. Each is called in a request's own step, sends, and never blocks. It raises RetryAttempt when the
attempt is over, and another error when the request is. What may happen (P is the prefill leg, D the decode leg):

  1. P refuses, fails or is lost before D has spoken → RetryAttempt; D's slot is cancelled at once.
  2. D refuses → another D, or the same again after its retry_after; P computes on. No clock of the transfer runs
     meanwhile.
  3. D fails or is lost while P still holds the KV → another D under a new attempt number; P sends again without
     computing.
  4. D fails or is lost later → RetryAttempt, which replays prompt + emitted tokens.
  5. P's first token is held back until D has reserved (or it ends the request), so that what was streamed can go on.
  6. P may leave the first token to D, and says Computed in its place. Then D speaks first, perhaps before P does.
  7. P keeps its KV for as long as its card says. After that no D is asked for it: the prompt is tried anew.
  8. An embedding runs as a request on one node does. Embedded stands in the place of its tokens and of Finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pdcluster.core import errors
from pdcluster.core.messages import (
    Cancel,
    Computed,
    Deliver,
    Delivered,
    Embedded,
    Endpoint,
    Failed,
    Finished,
    Prefill,
    Refused,
    Release,
    Reserve,
    Reserved,
    Scheduled,
    Ticket,
    TokenRow,
    Work,
)
from pdcluster_router.cluster.legs import Body, LegLost, NodeReconnected, RequestLeg, error_of, refusal
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.core.generation import TokenChunk
from pdcluster_router.core.job import RetryAttempt
from pdcluster_router.request.attempt import Attempt
from pdcluster_router.request.states import ATTEMPT, AttemptState

S = AttemptState

# Decode legs that may fail (refusals are none) before the prompt is tried anew.
MAX_DECODE_FAILURES = 3

# How long a request that all decode nodes refused waits before it looks at them again, however late they want to be
# asked: another one may have come, or have room.
LOOK_AGAIN_S = 0.25


# ---------------------------------------------------------------- an attempt's start and end


def begin(attempt: Attempt) -> None:
    """Send the first frames. Raises RetryAttempt when a node is already gone."""
    job, node, shared = attempt.job, attempt.decode_node, attempt.shared
    assert node is not None  # as it was chosen
    attempt.queue_by = shared.clock() + attempt.queue_s
    attempt.due = min(job.deadline, attempt.queue_by)
    if attempt.prefill_node is None:
        attempt.state = ATTEMPT[attempt.state, "compute"]
        attempt.decode = leg = _enter(attempt, node.endpoint)
        fork_of = job.fork_of if job.fork_on is not None and node.endpoint.incarnation == job.fork_on else None
        _send(attempt, leg, Prefill(_work(attempt, leg), False, attempt.pull, fork_of, job.pooling))
        return
    attempt.state = ATTEMPT[attempt.state, "prefill"]
    attempt.prefill = leg = _enter(attempt, attempt.prefill_node.endpoint)
    _send(attempt, leg, Prefill(_work(attempt, leg), True, attempt.pull))
    if node.has_slack and not (job.busy and job.busy_s(node.endpoint.incarnation, shared.clock())):
        _reserve(attempt, node)


def stop(attempt: Attempt, reason: str) -> None:
    """Cancel what still runs. Called once, however the attempt ended."""
    attempt.state = ATTEMPT[attempt.state, "stop"]
    if attempt.places:
        _leave_places(attempt, attempt.decode)
    leave_decode(attempt, reason)
    prefill, attempt.prefill = attempt.prefill, None
    if prefill is not None:
        if attempt.report is None and attempt.finished_by is not prefill:
            _cancel(attempt, prefill, reason)
            _release(attempt, prefill)
        attempt.shared.cluster.ledger.leave(prefill)


def leave_decode(attempt: Attempt, reason: str) -> None:
    """Cancel the decode leg, if it still runs. Idempotent."""
    decode, attempt.decode = attempt.decode, None
    if decode is None:
        return
    # It refers to the client's connection, which may carry another answer next.
    decode.way = None
    if attempt.finished_by is not decode:
        _cancel(attempt, decode, reason)
    attempt.shared.cluster.ledger.leave(decode)


# ---------------------------------------------------------------- clocks


def expire(attempt: Attempt, now: float) -> None:
    """Act on a clock that ran out. Raises RetryAttempt or DeadlineExceeded."""
    job, stages = attempt.job, attempt.shared.settings.stages
    if now >= job.deadline:
        raise errors.DeadlineExceeded(
            f"request {job.request} was not done by its deadline, after {len(job.emitted)} tokens", "request"
        )
    if now >= attempt.queue_by:
        first = attempt.prefill or attempt.decode
        assert first is not None  # it has nodes
        late = f"node {first.endpoint.node} did not schedule the prompt within {stages.queue_s:g} s"
        raise RetryAttempt(errors.DeadlineExceeded(late, "queue"), first.endpoint.incarnation)
    attempt.state_by = math.inf
    if attempt.state is S.PREFILLING:
        reserve_anywhere(attempt)
    elif attempt.state is S.RESERVING:
        _decode_failed(attempt, errors.DeadlineExceeded("the decode node did not answer Reserve", "handshake"))
    elif attempt.state is S.CARRYING:
        _decode_failed(attempt, errors.DeadlineExceeded("the decode node got no commit", "transfer"))
    else:
        name = attempt.decode.endpoint.node if attempt.decode is not None else "none"
        _decode_failed(
            attempt, errors.DeadlineExceeded(f"no token from node {name} for {stages.liveness_s:g} s", "liveness")
        )


# ---------------------------------------------------------------- what nodes say


def continues(attempt: Attempt, incarnation: str, row: TokenRow) -> bool:
    """Whether the row is just the next one of the decode leg, as nearly all messages are.

    Then it is taken in, as `handle` would: the client may see its tokens. Else it is still to be handled.
    """
    leg, emitted = attempt.decode, attempt.job.emitted
    position, tokens = len(emitted), row.tokens
    if (
        attempt.state is not S.DECODING
        or leg is None
        or row.position != position
        or position < 2
        or not tokens
        or leg.attempt != row.attempt
        or leg.endpoint.incarnation != incarnation
        or attempt.early
        or attempt.finished is not None
    ):
        return False
    # Which is later than it was, so that `due` stays.
    attempt.state_by = attempt.shared.clock() + attempt.liveness_s
    emitted += tokens
    return True


def handle(attempt: Attempt, incarnation: str, body: Body) -> None:
    """A message of a node. Answers of legs that are over are ignored, after the last token all but a report."""
    leg, number, kind = attempt.decode, body.attempt, type(body)
    if leg is None or leg.attempt != number:
        leg = attempt.prefill  # no two have the same number
    if leg is None or leg.attempt != number or leg.endpoint.incarnation != incarnation or kind is Refused:
        leg = _leg_of(attempt, incarnation, body)
    if leg is None:
        return
    if attempt.finished is not None and attempt.is_complete and kind is not Delivered:
        return
    _ON[kind](attempt, leg, body)


def _leg_of(attempt: Attempt, incarnation: str, body: Body) -> RequestLeg | None:
    prefill, decode, number = attempt.prefill, attempt.decode, body.attempt
    if type(body) is Refused and body.leg == "deliver":
        from_writer = prefill is not None and prefill.endpoint.incarnation == incarnation
        return decode if from_writer and decode is not None and decode.attempt == number else None
    for leg in (decode, prefill):  # no two have the same number
        if leg is not None and leg.endpoint.incarnation == incarnation and leg.attempt == number:
            return leg
    if number is not None:
        return None
    return next((leg for leg in (prefill, decode) if leg is not None and leg.endpoint.incarnation == incarnation), None)


def _on_scheduled(attempt: Attempt, leg: RequestLeg, message: Scheduled) -> None:
    attempt.queue_by = math.inf
    attempt.scheduled_at = attempt.shared.clock()
    if message.cached_tokens is not None and attempt.job.note_cached(message.cached_tokens):
        attempt.known_route = None
    if attempt.decode is None and attempt.state_by == math.inf:
        reserve_anywhere(attempt)


def _on_computed(attempt: Attempt, leg: RequestLeg, message: Computed) -> None:
    if leg is not attempt.prefill:
        return
    attempt.note_computed()
    if attempt.job.note_cached(message.cached_tokens):
        attempt.known_route = None
    if attempt.state is S.CARRYING:
        attempt.set_clock(attempt.shared.settings.stages.transfer_s)
    elif attempt.state is S.PREFILLING and attempt.state_by == math.inf:
        reserve_anywhere(attempt)  # its Scheduled was lost


def _on_row(attempt: Attempt, leg: RequestLeg, row: TokenRow) -> None:
    if not row.tokens:
        return  # a node says again what was lost, and nothing was
    _check_kind(attempt, leg, row)
    if leg is attempt.prefill:
        _on_first_row(attempt, row)
        return
    attempt.queue_by = math.inf
    if attempt.state is not S.DECODING:
        attempt.state = ATTEMPT[attempt.state, "row"]
        attempt.note_computed()
    attempt.set_clock(attempt.liveness_s)
    _emit(attempt, row)


def _on_first_row(attempt: Attempt, row: TokenRow) -> None:
    """Of the prefill leg."""
    attempt.note_computed()
    if attempt.state is S.DECODING and not attempt.job.awaits_prompt_logprobs:
        return
    if attempt.state is S.PREFILLING or attempt.state is S.RESERVING:
        attempt.held = row
        if attempt.decode is None and attempt.state_by == math.inf:
            reserve_anywhere(attempt)  # its Scheduled was lost
        return
    if attempt.state is S.CARRYING:
        attempt.set_clock(attempt.shared.settings.stages.transfer_s)
    _emit(attempt, row)


def _on_reserved(attempt: Attempt, leg: RequestLeg, message: Reserved) -> None:
    if leg is not attempt.decode or attempt.prefill is None:
        return
    if attempt.state is S.RESERVING:
        attempt.state = ATTEMPT[attempt.state, "ticket"]
        attempt.state_by = math.inf
    if attempt.places:
        _leave_places(attempt, leg)
    attempt.ticket, attempt.known_route = message.ticket, None
    attempt.backend = _backend_of(message.ticket)
    _deliver(attempt, message.ticket)
    # Runs only while a decode node has reserved: who waits for room loses no time of the transfer.
    if attempt.state is S.CARRYING and attempt.computed_at is not None:
        attempt.set_clock(attempt.shared.settings.stages.transfer_s)
    if attempt.held is not None:
        row, attempt.held = attempt.held, None
        _emit(attempt, row)


def _on_delivered(attempt: Attempt, leg: RequestLeg, message: Delivered) -> None:
    attempt.report, attempt.known_route = message.timings, None
    if attempt.job.awaits_prompt_logprobs:  # its row went before this
        raise RetryAttempt(errors.TransferError("the prompt's logprobs were lost on their way"), None)
    if attempt.state is S.CARRYING and not attempt.is_complete:
        attempt.state = ATTEMPT[attempt.state, "delivered"]
        attempt.set_clock(attempt.liveness_s)
    attempt.shared.cluster.ledger.leave(leg)  # the node is done with it: what decodes elsewhere is not its load


def _on_finished(attempt: Attempt, leg: RequestLeg, message: Finished) -> None:
    _check_kind(attempt, leg, message)
    attempt.finished, attempt.finished_by = message, leg
    is_of_prompt = leg is attempt.prefill
    if is_of_prompt:
        attempt.report, attempt.known_route = message.timings, None
    if (is_of_prompt or attempt.prefill is None) and attempt.job.note_cached(message.timings.cached_tokens):
        attempt.known_route = None
    if attempt.held is not None:
        row, attempt.held = attempt.held, None
        _emit(attempt, row)


def _on_embedded(attempt: Attempt, leg: RequestLeg, message: Embedded) -> None:
    _check_kind(attempt, leg, message)
    attempt.queue_by = math.inf
    attempt.note_computed()
    attempt.vector, attempt.finished_by = message.vector, leg
    attempt.finished = Finished(message.request, message.attempt, "stop", 0, message.timings)
    if attempt.job.note_cached(message.timings.cached_tokens):
        attempt.known_route = None


def _check_kind(attempt: Attempt, leg: RequestLeg, message: TokenRow | Finished | Embedded) -> None:
    """Raises RetryAttempt for tokens in the place of an embedding, the other way round, and one of another size."""
    pooling = attempt.job.pooling
    if isinstance(message, Embedded) and pooling is not None:
        size = len(message.vector) // 4
        if pooling.dimensions in (0, size):
            return
        what = f"{size} numbers for {pooling.dimensions}"
    elif isinstance(message, Embedded) == (pooling is not None):
        return
    else:
        what = f"{type(message).__name__} for {'tokens' if pooling is None else 'an embedding'}"
    cause = errors.TransferError(f"node {leg.endpoint.node} answered with {what}")
    raise RetryAttempt(cause, leg.endpoint.incarnation)


def _on_reconnected(attempt: Attempt, leg: RequestLeg, _: NodeReconnected) -> None:
    """The ticket may have been lost with the link; a node that has it does nothing."""
    if leg is attempt.prefill and attempt.state is S.CARRYING and attempt.ticket is not None:
        _deliver(attempt, attempt.ticket)


def _on_refused(attempt: Attempt, leg: RequestLeg, message: Refused) -> None:
    cause = refusal(message)
    if message.leg == "deliver":
        _decode_failed(attempt, errors.TransferError(f"KV could not be handed over: {message.reason}"))
        return
    if message.leg == "reserve":
        attempt.places = {**attempt.places, leg.endpoint.incarnation: leg}
        _leave_slot(attempt)
    if not message.retryable:
        raise cause
    _leave_alone(attempt, leg, message.retry_after_s)
    if message.leg != "reserve":
        raise RetryAttempt(cause, leg.endpoint.incarnation)
    reserve_anywhere(attempt)


def _on_failed(attempt: Attempt, leg: RequestLeg, message: Failed) -> None:
    _leg_lost(attempt, leg, error_of(message))


def _on_lost(attempt: Attempt, leg: RequestLeg, lost: LegLost) -> None:
    _leg_lost(attempt, leg, errors.NodeLost(f"node {leg.endpoint.node}: {lost.reason}"))


_ON: Mapping[type[Body], Callable[[Attempt, RequestLeg, Any], None]] = {
    TokenRow: _on_row,
    Scheduled: _on_scheduled,
    Computed: _on_computed,
    Reserved: _on_reserved,
    Delivered: _on_delivered,
    Finished: _on_finished,
    Embedded: _on_embedded,
    Refused: _on_refused,
    Failed: _on_failed,
    LegLost: _on_lost,
    NodeReconnected: _on_reconnected,
}


def _leave_alone(attempt: Attempt, leg: RequestLeg, seconds: float) -> None:
    shared = attempt.shared
    attempt.job.busy[leg.endpoint.incarnation] = shared.clock() + max(seconds, shared.settings.stages.hold_s)


def _leg_lost(attempt: Attempt, leg: RequestLeg, cause: errors.PdclusterError) -> None:
    is_needless = attempt.state is S.DECODING or attempt.state is S.REPORTING or attempt.report is not None
    if leg is attempt.prefill and is_needless and not attempt.job.awaits_prompt_logprobs:
        attempt.report = attempt.report or attempt.seen_timings(len(attempt.job.emitted))
        return
    if not cause.retryable:
        raise cause
    if leg is attempt.decode and attempt.prefill is not None:
        _decode_failed(attempt, cause)
        return
    if isinstance(cause, errors.Overloaded):
        _leave_alone(attempt, leg, cause.retry_after_s)
    raise RetryAttempt(cause, leg.endpoint.incarnation)


def _decode_failed(attempt: Attempt, cause: errors.PdclusterError) -> None:
    """Rules 3, 4 and 7: while the prefill node holds the KV only the decode leg is made anew."""
    failed = attempt.decode
    if failed is None:
        return
    _cancel(attempt, failed, str(cause))
    attempt.decode_failures += 1
    if (
        attempt.prefill is None
        or attempt.report is not None
        or attempt.state is S.DECODING
        or attempt.decode_failures >= MAX_DECODE_FAILURES
        or attempt.shared.clock() >= attempt.kv_until
    ):
        raise RetryAttempt(cause, failed.endpoint.incarnation)
    attempt.avoid |= {failed.endpoint.incarnation}
    _leave_slot(attempt)
    reserve_anywhere(attempt)


# ---------------------------------------------------------------- reserving


def reserve_anywhere(attempt: Attempt) -> None:
    """Reserve on the best decode node that has not just refused or failed; when all have, ask again later."""
    job, now, avoid = attempt.job, attempt.shared.clock(), attempt.avoid
    if now >= attempt.kv_until:
        raise RetryAttempt(_kv_gone(attempt), None)
    preferred = attempt.decode_node
    if (
        preferred is None
        or preferred.endpoint.incarnation in avoid
        or (job.busy and job.busy_s(preferred.endpoint.incarnation, now))
    ):
        preferred = _pick_decode(attempt, now)
    if preferred is None:
        attempt.avoid = frozenset()
        preferred = _pick_decode(attempt, now)
        if preferred is None:
            raise RetryAttempt(errors.NoNodeTakesWork("no decode node takes work now"), None)
        _wait_for_room(attempt, attempt.shared.settings.stages.hold_s)
    elif job.busy and job.busy_s(preferred.endpoint.incarnation, now):
        _wait_for_room(attempt, min(LOOK_AGAIN_S, *(until - now for until in job.busy.values() if until > now)))
    else:
        _reserve(attempt, preferred)


def _kv_gone(attempt: Attempt) -> errors.Overloaded:
    node = attempt.prefill_node
    assert node is not None  # it computed the prompt
    kept_s = node.capabilities.parks_s
    return errors.Overloaded(f"no decode node had room in the {kept_s:g} s for which {node.name} keeps KV", 0.0)


def _pick_decode(attempt: Attempt, now: float) -> NodeView | None:
    assert attempt.prefill_node is not None  # else there is nothing to reserve
    return attempt.shared.selector.choose_decode(attempt.job, now, attempt.prefill_node, attempt.avoid)


def _wait_for_room(attempt: Attempt, seconds: float) -> None:
    attempt.decode_node = attempt.known_route = None
    attempt.set_clock(min(seconds, attempt.kv_until - attempt.shared.clock()))


def _reserve(attempt: Attempt, node: NodeView) -> None:
    assert attempt.prefill is not None
    attempt.state = ATTEMPT[attempt.state, "reserve"]
    attempt.decode_node, attempt.known_route = node, None
    attempt.decode = leg = _enter(attempt, node.endpoint)
    attempt.set_clock(attempt.shared.settings.stages.handshake_s)
    try:
        _send(attempt, leg, Reserve(_work(attempt, leg), attempt.prefill.endpoint))
    except RetryAttempt as lost:
        _decode_failed(attempt, lost.cause)


def _leave_slot(attempt: Attempt) -> None:
    if attempt.decode is not None:
        attempt.shared.cluster.ledger.leave(attempt.decode)
        attempt.state = ATTEMPT[attempt.state, "slot lost"]
    attempt.decode = None
    attempt.state_by = math.inf


def _leave_places(attempt: Attempt, served: RequestLeg | None) -> None:
    """Nodes that had no room keep a place in line for the request. It needs none any more."""
    for incarnation, leg in attempt.places.items():
        if served is None or served.endpoint.incarnation != incarnation:
            _cancel(attempt, leg, "it has a slot elsewhere, or ended")
    attempt.places = {}


def _deliver(attempt: Attempt, ticket: Ticket) -> None:
    assert attempt.prefill is not None
    try:
        attempt.shared.cluster.send(attempt.prefill.endpoint, Deliver(ticket))
    except errors.NodeLost as error:
        _leg_lost(attempt, attempt.prefill, error)


def _backend_of(ticket: Ticket) -> str:
    """By which its KV will come, as far as one can tell before."""
    adverts = ticket.reader.adverts
    return adverts[0][0] if adverts else ""


# ---------------------------------------------------------------- sending and emitting


def _enter(attempt: Attempt, endpoint: Endpoint) -> RequestLeg:
    """A new leg, under the next number."""
    job = attempt.job
    leg = RequestLeg(job.request, job.attempts, endpoint, job.emitted)
    job.attempts += 1
    attempt.shared.cluster.ledger.enter(leg)
    return leg


def _work(attempt: Attempt, leg: RequestLeg) -> Work:
    return attempt.job.work(leg.attempt, attempt.shared.clock(), attempt.base)


def _send(attempt: Attempt, leg: RequestLeg, message: Prefill | Reserve) -> None:
    try:
        attempt.shared.cluster.send(leg.endpoint, message)
    except errors.NodeLost as error:
        raise RetryAttempt(error, leg.endpoint.incarnation) from error


def _cancel(attempt: Attempt, leg: RequestLeg, reason: str) -> None:
    _tell(attempt, leg, Cancel(attempt.job.request, leg.attempt, reason))


def _release(attempt: Attempt, leg: RequestLeg) -> None:
    _tell(attempt, leg, Release(attempt.job.request))


def _tell(attempt: Attempt, leg: RequestLeg, message: Cancel | Release) -> None:
    try:
        attempt.shared.cluster.send(leg.endpoint, message)
    except errors.NodeLost:
        return  # a node that is gone holds nothing; if it comes back, its Hello shows that we no longer wait for it


def _emit(attempt: Attempt, row: TokenRow) -> None:
    """Tell the part of `row` (and of rows that came early) that continues the stream; what was emitted before is
    dropped. The first has the prompt's logprobs, where they are asked for."""
    job = attempt.job
    if (
        not attempt.early
        and row.position <= len(job.emitted)
        and (job.has_prompt_logprobs or not job.awaits_prompt_logprobs)
    ):
        chunk = _continued(attempt, row)
        if chunk is not None:
            attempt.emit(chunk)
        return
    attempt.early = [*attempt.early, row]
    in_order = sorted(attempt.early, key=lambda each: (each.position, not each.prompt_logprobs))
    chunks = [chunk for early in in_order if (chunk := _continued(attempt, early)) is not None]
    attempt.early = [each for each in attempt.early if each.position + len(each.tokens) > len(job.emitted)]
    for chunk in chunks:
        if attempt.state is not S.OVER:
            attempt.emit(chunk)


def _continued(attempt: Attempt, row: TokenRow) -> TokenChunk | None:
    job, tokens = attempt.job, row.tokens
    emitted = len(job.emitted)
    seen = emitted - row.position
    if (
        seen < 0
        or seen >= len(tokens)
        or (not job.has_prompt_logprobs and not row.prompt_logprobs and job.awaits_prompt_logprobs)
    ):
        return None
    tokens = tokens[seen:] if seen else tokens
    job.emitted += tokens
    if emitted <= 1:
        now = attempt.shared.clock()
        if not emitted:
            job.first_token_at = now
            attempt.record.first_token(now)
        if len(job.emitted) > 1:
            job.second_token_at = job.second_token_at or now
    prompt_logprobs = () if job.has_prompt_logprobs else row.prompt_logprobs
    job.has_prompt_logprobs = True
    return TokenChunk(emitted, tokens, row.logprobs[seen:], prompt_logprobs, attempt.known_route or attempt.route())
