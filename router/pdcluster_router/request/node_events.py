"""What each thing that a node says leads to, and what a request says to nodes.

One function per event. Each is called in a request's own step, sends, and never blocks. It raises RetryAttempt when the
attempt is over, and another error when the request is. What may happen (P is the prefill leg, D the decode leg):

  1. P refuses, fails or is lost before D has spoken → RetryAttempt; D's slot is cancelled at once.
  2. D refuses → another D, or the same again after its retry_after; P computes on. No clock of the transfer runs
     meanwhile.
  3. D fails or is lost while P still holds the KV → another D under a new attempt number; P sends again without
     computing.
  4. D fails or is lost later → RetryAttempt, which replays prompt + emitted tokens.
  5. P's first token is held back until D has reserved (or it ends the request), so that what was streamed can go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pdcluster.core import errors
from pdcluster.core.messages import (
    Cancel,
    Deliver,
    Delivered,
    Endpoint,
    Failed,
    Finished,
    LegTimings,
    Prefill,
    Pull,
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
from pdcluster_router.policy.base import RoutingDecision
from pdcluster_router.request.states import RequestState

if TYPE_CHECKING:
    from pdcluster_router.request.request import Request

S = RequestState

# Decode legs that may fail (refusals are none) before the prompt is tried anew.
MAX_DECODE_FAILURES = 3

# How long a request that all decode nodes refused waits before it looks at them again, however late they want to be
# asked: another one may have come, or have room.
LOOK_AGAIN_S = 0.25


# ---------------------------------------------------------------- an attempt's start and end


def begin(request: Request, choice: RoutingDecision) -> None:
    """Send the first frames. Raises RetryAttempt when a node is already gone."""
    job, node, shared = request.job, choice.decode, request.shared
    request.decode_node = node
    if choice.pull is not None and choice.pull_tokens:
        request.pull = Pull(choice.pull.endpoint, choice.pull_tokens)
    request.queue_by = shared.clock() + shared.settings.stages.queue_s
    request.due = min(job.deadline, request.queue_by)
    if choice.prefill is None:
        request.go("compute")
        request.decode = leg = _enter(request, node.endpoint)
        fork_of = job.fork_of if job.fork_on is not None and node.endpoint.incarnation == job.fork_on else None
        _send(request, leg, Prefill(_work(request, leg), False, request.pull, fork_of))
        return
    request.go("prefill")
    request.prefill = leg = _enter(request, choice.prefill.endpoint)
    _send(request, leg, Prefill(_work(request, leg), True, request.pull))
    if node.has_slack and not (job.busy and job.busy_s(node.endpoint.incarnation, shared.clock())):
        _reserve(request, node)


def stop(request: Request, reason: str) -> None:
    """Cancel what still runs. Idempotent; called however the attempt ended."""
    _leave_places(request, request.decode)
    leave_decode(request, reason)
    prefill, request.prefill = request.prefill, None
    if prefill is not None:
        if request.report is None and request.finished_by is not prefill:
            _cancel(request, prefill, reason)
            _release(request, prefill)
        request.shared.cluster.ledger.leave(prefill)


def leave_decode(request: Request, reason: str) -> None:
    """Cancel the decode leg, if it still runs. Idempotent."""
    decode, request.decode = request.decode, None
    if decode is None:
        return
    # It leads to a line that may be another answer's next, and knows the request, all of which it would keep.
    decode.way = None
    if request.finished_by is not decode:
        _cancel(request, decode, reason)
    request.shared.cluster.ledger.leave(decode)


# ---------------------------------------------------------------- clocks


def expire(request: Request, now: float) -> None:
    """Act on a clock that ran out. Raises RetryAttempt or DeadlineExceeded."""
    job, stages = request.job, request.shared.settings.stages
    if now >= job.deadline:
        raise errors.DeadlineExceeded(
            f"request {job.request} was not done by its deadline, after {len(job.emitted)} tokens", "request"
        )
    if now >= request.queue_by:
        first = request.prefill or request.decode
        assert first is not None  # it has nodes
        late = f"node {first.endpoint.node} did not schedule the prompt within {stages.queue_s:g} s"
        raise RetryAttempt(errors.DeadlineExceeded(late, "queue"), first.endpoint.incarnation)
    request.state_by = math.inf
    if request.state is S.PREFILLING:
        reserve_anywhere(request)
    elif request.state is S.RESERVING:
        _decode_failed(request, errors.DeadlineExceeded("the decode node did not answer Reserve", "handshake"))
    elif request.state is S.CARRYING:
        _decode_failed(request, errors.DeadlineExceeded("the decode node got no commit", "transfer"))
    else:
        name = request.decode.endpoint.node if request.decode is not None else "none"
        _decode_failed(
            request, errors.DeadlineExceeded(f"no token from node {name} for {stages.liveness_s:g} s", "liveness")
        )


# ---------------------------------------------------------------- what nodes say


def goes_on(request: Request, incarnation: str, row: TokenRow) -> bool:
    """Whether the row is just the next one of the decode leg, as nearly all that is said is. Then it is taken in, as
    `handle` would: the client may see its tokens. Else it is still to be handled."""
    leg, emitted = request.decode, request.job.emitted
    position, tokens = len(emitted), row.tokens
    if (
        request.state is not S.DECODING
        or leg is None
        or row.position != position
        or position < 2
        or not tokens
        or leg.attempt != row.attempt
        or leg.endpoint.incarnation != incarnation
        or request.early
        or request.finished is not None
    ):
        return False
    # Which is later than it was, so that `due` stays.
    request.state_by = request.shared.clock() + request.shared.settings.stages.liveness_s
    emitted += tokens
    return True


def handle(request: Request, incarnation: str, body: Body) -> None:
    """What a node said. Answers of legs that are over are ignored, after the last token all but a report."""
    leg, attempt, kind = request.decode, body.attempt, type(body)
    if leg is None or leg.attempt != attempt:
        leg = request.prefill  # no two have the same number
    if leg is None or leg.attempt != attempt or leg.endpoint.incarnation != incarnation or kind is Refused:
        leg = _leg_of(request, incarnation, body)
    if leg is None:
        return
    if request.finished is not None and request.is_complete and kind is not Delivered:
        return
    _ON[kind](request, leg, body)


def _leg_of(request: Request, incarnation: str, body: Body) -> RequestLeg | None:
    prefill, decode, attempt = request.prefill, request.decode, body.attempt
    if type(body) is Refused and body.leg == "deliver":
        from_writer = prefill is not None and prefill.endpoint.incarnation == incarnation
        return decode if from_writer and decode is not None and decode.attempt == attempt else None
    for leg in (decode, prefill):  # no two have the same number
        if leg is not None and leg.endpoint.incarnation == incarnation and leg.attempt == attempt:
            return leg
    if attempt is not None:
        return None
    return next((leg for leg in (prefill, decode) if leg is not None and leg.endpoint.incarnation == incarnation), None)


def _on_scheduled(request: Request, leg: RequestLeg, message: Scheduled) -> None:
    request.queue_by = math.inf
    request.scheduled_at = request.shared.clock()
    if request.job.note_cached(message.cached_tokens):
        request.told_route = None
    if request.decode is None and request.state_by == math.inf:
        reserve_anywhere(request)


def _on_row(request: Request, leg: RequestLeg, row: TokenRow) -> None:
    if not row.tokens:
        return  # a node says again what was lost, and nothing was
    if leg is request.prefill:
        _on_first_row(request, row)
        return
    request.queue_by = math.inf
    if request.state is not S.DECODING:
        request.go("row")
        _note_computed(request)
    request.set_clock(request.shared.settings.stages.liveness_s)
    _emit(request, row)


def _on_first_row(request: Request, row: TokenRow) -> None:
    """Of the prefill leg."""
    request.queue_by = math.inf
    _note_computed(request)
    if request.state is S.DECODING and not request.job.awaits_prompt_logprobs:
        return
    if request.state is S.PREFILLING or request.state is S.RESERVING:
        request.held = row
        if request.decode is None and request.state_by == math.inf:
            reserve_anywhere(request)  # its Scheduled was lost
        return
    if request.state is S.CARRYING:
        request.set_clock(request.shared.settings.stages.transfer_s)
    _emit(request, row)


def _on_reserved(request: Request, leg: RequestLeg, message: Reserved) -> None:
    if leg is not request.decode or request.prefill is None:
        return
    if request.state is S.RESERVING:
        request.go("ticket")
        request.state_by = math.inf
    _leave_places(request, leg)
    request.ticket, request.told_route = message.ticket, None
    request.backend = _backend_of(message.ticket)
    _deliver(request, message.ticket)
    # Runs only while a decode node has reserved: who waits for room loses no time of the transfer.
    has_token = request.held is not None or len(request.job.emitted) > request.base
    if request.state is S.CARRYING and has_token:
        request.set_clock(request.shared.settings.stages.transfer_s)
    if request.held is not None:
        row, request.held = request.held, None
        _emit(request, row)


def _on_delivered(request: Request, leg: RequestLeg, message: Delivered) -> None:
    _note_report(request, message.timings)
    if request.job.awaits_prompt_logprobs:  # its row went before this
        raise RetryAttempt(errors.TransferError("the prompt's logprobs were lost on their way"), None)
    if request.state is S.CARRYING and not request.is_complete:
        request.go("delivered")
        request.set_clock(request.shared.settings.stages.liveness_s)
    request.shared.cluster.ledger.leave(leg)  # the node is done with it: what decodes elsewhere is not its load


def _on_finished(request: Request, leg: RequestLeg, message: Finished) -> None:
    request.finished, request.finished_by = message, leg
    is_of_prompt = leg is request.prefill
    if is_of_prompt:
        _note_report(request, message.timings)
    if (is_of_prompt or request.prefill is None) and request.job.note_cached(message.timings.cached_tokens):
        request.told_route = None
    if request.held is not None:
        row, request.held = request.held, None
        _emit(request, row)


def _on_reconnected(request: Request, leg: RequestLeg, _: NodeReconnected) -> None:
    """The ticket may have been lost with the link; a node that has it does nothing."""
    if leg is request.prefill and request.state is S.CARRYING and request.ticket is not None:
        _deliver(request, request.ticket)


def _on_refused(request: Request, leg: RequestLeg, message: Refused) -> None:
    cause = refusal(message)
    if message.leg == "deliver":
        _decode_failed(request, errors.TransferError(f"KV could not be handed over: {message.reason}"))
        return
    if message.leg == "reserve":
        request.places = {**request.places, leg.endpoint.incarnation: leg}
        _leave_slot(request)
    if not message.retryable:
        raise cause
    _leave_alone(request, leg, message.retry_after_s)
    if message.leg != "reserve":
        raise RetryAttempt(cause, leg.endpoint.incarnation)
    reserve_anywhere(request)


def _on_failed(request: Request, leg: RequestLeg, message: Failed) -> None:
    _leg_lost(request, leg, error_of(message))


def _on_lost(request: Request, leg: RequestLeg, lost: LegLost) -> None:
    _leg_lost(request, leg, errors.NodeLost(f"node {leg.endpoint.node}: {lost.reason}"))


_ON: Mapping[type[Body], Callable[[Request, RequestLeg, Any], None]] = {
    TokenRow: _on_row,
    Scheduled: _on_scheduled,
    Reserved: _on_reserved,
    Delivered: _on_delivered,
    Finished: _on_finished,
    Refused: _on_refused,
    Failed: _on_failed,
    LegLost: _on_lost,
    NodeReconnected: _on_reconnected,
}


def _note_computed(request: Request) -> None:
    if request.computed_at is None:
        request.computed_at = request.shared.clock()


def _note_report(request: Request, timings: LegTimings) -> None:
    request.report, request.told_route = timings, None


def _leave_alone(request: Request, leg: RequestLeg, seconds: float) -> None:
    shared = request.shared
    request.job.busy[leg.endpoint.incarnation] = shared.clock() + max(seconds, shared.settings.stages.hold_s)


def _leg_lost(request: Request, leg: RequestLeg, cause: errors.PdclusterError) -> None:
    is_needless = request.state is S.DECODING or request.state is S.REPORTING or request.report is not None
    if leg is request.prefill and is_needless and not request.job.awaits_prompt_logprobs:
        request.report = request.report or request.seen_timings(len(request.job.emitted))
        return
    if not cause.retryable:
        raise cause
    if leg is request.decode and request.prefill is not None:
        _decode_failed(request, cause)
        return
    if isinstance(cause, errors.Overloaded):
        _leave_alone(request, leg, cause.retry_after_s)
    raise RetryAttempt(cause, leg.endpoint.incarnation)


def _decode_failed(request: Request, cause: errors.PdclusterError) -> None:
    """Rules 3 and 4: while the prefill node holds the KV only the decode leg is made anew."""
    failed = request.decode
    if failed is None:
        return
    _cancel(request, failed, str(cause))
    request.decode_failures += 1
    if (
        request.prefill is None
        or request.report is not None
        or request.state is S.DECODING
        or request.decode_failures >= MAX_DECODE_FAILURES
    ):
        raise RetryAttempt(cause, failed.endpoint.incarnation)
    request.avoid |= {failed.endpoint.incarnation}
    _leave_slot(request)
    reserve_anywhere(request)


# ---------------------------------------------------------------- reserving


def reserve_anywhere(request: Request) -> None:
    """Reserve on the best decode node that has not just refused or failed; when all have, ask again later."""
    job, now, avoid = request.job, request.shared.clock(), request.avoid
    preferred = request.decode_node
    if (
        preferred is None
        or preferred.endpoint.incarnation in avoid
        or (job.busy and job.busy_s(preferred.endpoint.incarnation, now))
    ):
        preferred = _pick_decode(request, now)
    if preferred is None:
        request.avoid = frozenset()
        preferred = _pick_decode(request, now)
        if preferred is None:
            raise RetryAttempt(errors.NoNodeTakesWork("no decode node takes work now"), None)
        _wait_for_room(request, request.shared.settings.stages.hold_s)
    elif job.busy and job.busy_s(preferred.endpoint.incarnation, now):
        _wait_for_room(request, min(LOOK_AGAIN_S, *(until - now for until in job.busy.values() if until > now)))
    else:
        _reserve(request, preferred)


def _pick_decode(request: Request, now: float) -> NodeView | None:
    choice = request.choice
    assert choice is not None and choice.prefill is not None  # else there is nothing to reserve
    return request.shared.selector.choose_decode(request.job, now, choice.prefill, request.avoid)


def _wait_for_room(request: Request, seconds: float) -> None:
    request.decode_node = request.told_route = None
    request.set_clock(seconds)


def _reserve(request: Request, node: NodeView) -> None:
    assert request.prefill is not None
    request.go("reserve")
    request.decode_node, request.told_route = node, None
    request.decode = leg = _enter(request, node.endpoint)
    request.set_clock(request.shared.settings.stages.handshake_s)
    try:
        _send(request, leg, Reserve(_work(request, leg), request.prefill.endpoint))
    except RetryAttempt as lost:
        _decode_failed(request, lost.cause)


def _leave_slot(request: Request) -> None:
    if request.decode is not None:
        request.shared.cluster.ledger.leave(request.decode)
        request.go("slot lost")
    request.decode = None
    request.state_by = math.inf


def _leave_places(request: Request, served: RequestLeg | None) -> None:
    """Nodes that had no room keep a place in line for the request. It needs none any more."""
    if not request.places:
        return
    for incarnation, leg in request.places.items():
        if served is None or served.endpoint.incarnation != incarnation:
            _cancel(request, leg, "it has a slot elsewhere, or ended")
    request.places = {}


def _deliver(request: Request, ticket: Ticket) -> None:
    assert request.prefill is not None
    try:
        request.shared.cluster.send(request.prefill.endpoint, Deliver(ticket))
    except errors.NodeLost as error:
        _leg_lost(request, request.prefill, error)


def _backend_of(ticket: Ticket) -> str:
    """By which its KV will come, as far as one can tell before."""
    adverts = ticket.reader.adverts
    return adverts[0][0] if adverts else ""


# ---------------------------------------------------------------- sending and emitting


def _enter(request: Request, endpoint: Endpoint) -> RequestLeg:
    """A new leg, under the next number."""
    job = request.job
    leg = RequestLeg(job.request, job.attempts, endpoint, job.emitted)
    job.attempts += 1
    request.shared.cluster.ledger.enter(leg)
    return leg


def _work(request: Request, leg: RequestLeg) -> Work:
    return request.job.work(leg.attempt, request.shared.clock(), request.base)


def _send(request: Request, leg: RequestLeg, message: Prefill | Reserve) -> None:
    try:
        request.shared.cluster.send(leg.endpoint, message)
    except errors.NodeLost as error:
        raise RetryAttempt(error, leg.endpoint.incarnation) from error


def _cancel(request: Request, leg: RequestLeg, reason: str) -> None:
    _tell(request, leg, Cancel(request.job.request, leg.attempt, reason))


def _release(request: Request, leg: RequestLeg) -> None:
    _tell(request, leg, Release(request.job.request))


def _tell(request: Request, leg: RequestLeg, message: Cancel | Release) -> None:
    try:
        request.shared.cluster.send(leg.endpoint, message)
    except errors.NodeLost:
        return  # a node that is gone holds nothing; if it comes back, its Hello shows that we no longer wait for it


def _emit(request: Request, row: TokenRow) -> None:
    """Tell the part of `row` (and of rows that came early) that continues the stream; what was emitted before is
    dropped. The first has the prompt's logprobs, where they are asked for."""
    job = request.job
    if (
        not request.early
        and row.position <= len(job.emitted)
        and (job.has_prompt_logprobs or not job.awaits_prompt_logprobs)
    ):
        chunk = _continued(request, row)
        if chunk is not None:
            request.tell(chunk)
        return
    request.early = [*request.early, row]
    in_order = sorted(request.early, key=lambda each: (each.position, not each.prompt_logprobs))
    chunks = [chunk for early in in_order if (chunk := _continued(request, early)) is not None]
    request.early = [each for each in request.early if each.position + len(each.tokens) > len(job.emitted)]
    for chunk in chunks:
        if request.state is not S.ENDED:
            request.tell(chunk)


def _continued(request: Request, row: TokenRow) -> TokenChunk | None:
    job, tokens = request.job, row.tokens
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
        now = request.shared.clock()
        if not emitted:
            request.first_token_at = now
            request.record.first_token(now)
        if len(job.emitted) > 1:
            request.second_token_at = request.second_token_at or now
    prompt_logprobs = () if job.has_prompt_logprobs else row.prompt_logprobs
    job.has_prompt_logprobs = True
    return TokenChunk(emitted, tokens, row.logprobs[seen:], prompt_logprobs, request.told_route or request.route())
