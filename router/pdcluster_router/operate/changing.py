"""What operators change, through one router or all. Each returns what was done, as a sentence."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import grpc

from pdcluster.bootstrap.card_messages import role_to_proto
from pdcluster.core.errors import ConfigError, PdclusterError
from pdcluster.core.messages import Role
from pdcluster.rpc import admin_pb2 as pb
from pdcluster_router.operate import reading
from pdcluster_router.operate.clients import AdminClients, NotReached, RouterAdmin, RouterAnswer, answered, refusal

# A drain's stream outlives its deadline by what the router gives moved work.
DRAIN_GRACE_S = 30.0
# A router gives nodes less than this to load an adapter.
ADAPTER_CALL_S = 150.0
# What a router's answer may take beside what was asked for.
CALL_GRACE_S = 30.0
# For all nodes to load their weights.
LOAD_S = 1830.0
# What became of the choices that ran, by the mode of the pause.
PAUSE_ENDS = {"abort": "ended with what they had", "wait": "ended", "keep": "are held"}


def cordon(clients: AdminClients, node: str, *, cordoned: bool) -> str:
    clients.change_node("Cordon", pb.CordonRequest(node=node, cordoned=cordoned))
    return f"node {node} {'takes no new work; what runs goes on' if cordoned else 'takes work again'}"


def drain(clients: AdminClients, node: str, timeout_s: float) -> Generator[reading.Row, None, str]:
    """Yields what is left on the node, again and again. Closing it stops the wait; the node stays cordoned.

    Raises NotReached when the node is still at work after its deadline.
    """
    router, is_safe = clients.first(), False
    call = router.stub.Drain(pb.DrainRequest(node=node, deadline_s=timeout_s), timeout=timeout_s + DRAIN_GRACE_S)
    try:
        for progress in call:
            is_safe = progress.safe_to_stop
            yield reading.as_dict(progress)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise NotReached(error.details() or f"node {node} is still at work; it stays cordoned") from None
        raise refusal(RouterAnswer(router.address, None, error)) from error
    finally:
        call.cancel()
    if not is_safe:
        raise NotReached(f"the router ended the drain of node {node} before it was empty; it stays cordoned")
    return f"node {node} is empty: it may be stopped. pdctl uncordon {node} takes it back"


def progress_line(node: str, left: reading.Row) -> str:
    """What a drain waits for."""
    moved = f", {left['moved']} moved to other nodes" if left["moved"] else ""
    return (
        f"node {node}: waiting {left['waiting']}, running {left['running']}, parked {left['pages_parked']} pages{moved}"
    )


def set_role(clients: AdminClients, node: str, role: Role) -> str:
    told = clients.change_node("SetRole", pb.SetRoleRequest(node=node, role=role_to_proto(role)))
    return f"node {node} is a {reading.role_name(told.reply.role)} node now"


def load_adapter(clients: AdminClients, name: str, path: str, nodes: Sequence[str]) -> str:
    """At all these nodes, or all there are. Raises PdclusterError where one did not take it."""
    router = clients.first()
    return _adapter_change(router, "LoadAdapter", pb.LoadAdapterRequest(name=name, path=path, nodes=nodes), "loaded")


def unload_adapter(clients: AdminClients, name: str, nodes: Sequence[str]) -> str:
    router = clients.first()
    return _adapter_change(router, "UnloadAdapter", pb.UnloadAdapterRequest(name=name, nodes=nodes), "unloaded")


def _adapter_change(router: RouterAdmin, method: str, request: Any, done: str) -> str:
    try:
        told = getattr(router.stub, method)(request, timeout=ADAPTER_CALL_S).nodes
    except grpc.RpcError as error:
        raise refusal(RouterAnswer(router.address, None, error)) from error
    said = f"adapter {request.name} is {done} at {', '.join(each.node for each in told if not each.error) or 'no node'}"
    failed = [f"{each.node}: {each.error}" for each in told if each.error]
    if failed:
        raise PdclusterError(f"{said}; {'; '.join(failed)}")
    return said


def load_weights(
    clients: AdminClients,
    source: str,
    label: str,
    *,
    max_unavailable: int,
    canary_percent: float | None,
    finish_s: float,
    releases_first: bool = False,
) -> Generator[reading.Row, None, str]:
    """Yields where the rollout is. Closing it stops the rollout before the next nodes."""
    request = pb.LoadWeightsRequest(
        source=source, label=label, max_unavailable=max_unavailable, canary_percent=canary_percent, finish_s=finish_s,
        releases_first=releases_first,
    )  # fmt: skip
    return _rollout(clients, "LoadWeights", request)


def undo_weights(clients: AdminClients, finish_s: float) -> Generator[reading.Row, None, str]:
    return _rollout(clients, "UndoWeights", pb.UndoWeightsRequest(finish_s=finish_s))


def _rollout(clients: AdminClients, method: str, request: Any) -> Generator[reading.Row, None, str]:
    router, last = clients.first(), pb.RolloutProgress()
    call = getattr(router.stub, method)(request)
    try:
        for progress in call:
            last = progress
            yield reading.as_dict(progress)
    except grpc.RpcError as error:
        raise refusal(RouterAnswer(router.address, None, error)) from error
    finally:
        call.cancel()
    what = f"weights {last.label} (epoch {last.epoch}, digest {last.digest})"
    return f"{last.done} of {last.nodes} nodes serve {what} after {last.seconds:.1f} s"


def rollout_line(at: reading.Row) -> str:
    """What a rollout does now."""
    left = f": {at['running']} requests, {at['context_tokens']} tokens of context" if at["running"] else ""
    return f"{at['done']}/{at['nodes']} done, {at['seconds']:.0f} s: {at['node']} {at['stage']}{left}"


def pause(clients: AdminClients, mode: str, max_pause_s: float) -> str:
    """At all routers. Returns once no request runs."""
    request = pb.PauseRequest(mode=mode, max_pause_s=max_pause_s)
    told = answered(clients.ask("Pause", request, timeout_s=max_pause_s + CALL_GRACE_S))
    num, ends = sum(each.reply.running for each in told), PAUSE_ENDS[mode]
    return f"paused for {max_pause_s:g} s at most: {num} choices {ends}; pdctl resume ends it"


def resume(clients: AdminClients) -> str:
    told = answered(clients.ask("Resume", pb.ResumeRequest()))
    return "requests go on" if any(each.reply.was_paused for each in told) else "no router was paused"


def sleep(clients: AdminClients, mode: str, max_pause_s: float) -> str:
    """Pause all routers, and have all nodes sleep. Where none does in the end, the pause is taken back."""
    was_paused = any(each.reply.is_paused for each in answered(clients.ask("GetPause", pb.GetPauseRequest())))
    paused = pause(clients, mode, max_pause_s)
    try:
        names = _nodes_of(clients, "Sleep", pb.SleepRequest(mode=mode, max_pause_s=max_pause_s))
    except PdclusterError:
        if not was_paused and not any(row["state"] == "sleeping" for row in reading.nodes(clients)):
            resume(clients)
        raise
    return f"{paused.partition(';')[0]}; {_listed(names)} gave the memory back; pdctl wake ends it"


def wake(clients: AdminClients) -> str:
    """Wake all nodes that sleep, and end the pause of all routers."""
    names = _nodes_of(clients, "Wake", pb.WakeRequest())
    resume(clients)  # the router that woke them has, others may not
    return f"awake: {_listed(names)}; requests go on"


def _nodes_of(clients: AdminClients, method: str, request: Any) -> list[str]:
    """What a router says that it did to nodes."""
    router = clients.first()
    try:
        return list(getattr(router.stub, method)(request, timeout=LOAD_S).nodes)
    except grpc.RpcError as error:
        raise refusal(RouterAnswer(router.address, None, error)) from error


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no node"


def cancel(clients: AdminClients, request: str, reason: str) -> str:
    told = answered(clients.ask("CancelRequest", pb.CancelRequestRequest(id=request, reason=reason)))
    num = sum(each.reply.cancelled for each in told)
    return f"{num} choice{'' if num == 1 else 's'} of request {request} ended"


def set_policy(clients: AdminClients, live: str | None, shadow: str | None, *, dry_run: bool) -> str:
    """At all routers, after each has checked it. shadow: none removes it."""
    if live is None and shadow is None:
        raise ConfigError("nothing to set; pass --live POLICY or --shadow POLICY (none removes it)")
    shadow = "" if shadow == "none" else shadow
    for told in clients.ask("SetPolicy", pb.SetPolicyRequest(live=live, shadow=shadow, dry_run=True)):
        if told.error is not None:
            raise refusal(told)
    if dry_run:
        return "all routers would take it"
    done = clients.change_all("SetPolicy", pb.SetPolicyRequest(live=live, shadow=shadow))
    return f"policy {done.reply.live}, shadow {done.reply.shadow or 'none'} from the next decision on"
