"""Whether anybody waits in the router beside an idle node that could serve it, by what is true of nodes and clients.

A client waits at the gate while it has no node. It waits for a decode node while its prompt is computed and parked. A
node could serve it when it is up, takes work, has nothing to do (or, for a decode node, has room), fits and serves the
request. It could not while a hint to come back later runs. A node that failed the request is its last resort. The same
client must not wait for the same node longer than BOUND_S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from fuzz_client import Client
from fuzz_node import FuzzNode
from fuzz_plan import Plan

from pdcluster_router.core.room import HALF, PATIENCE
from pdcluster_router.request.request import Request
from pdcluster_router.request.states import AttemptState, RequestState

BOUND_S = 0.3
LOOK_S = 0.05


class Scene(Protocol):
    plan: Plan
    clients: Mapping[str, Client]
    versions: list[str]

    @property
    def now(self) -> float: ...

    def accepting(self) -> Iterable[FuzzNode]:
        """Nodes that the router may choose from."""
        ...

    def is_able(self, request: str, node: FuzzNode) -> bool:
        """Whether the node would answer the request well, and did not ask for a pause."""
        ...

    def is_heard(self, node: FuzzNode) -> bool:
        """Whether what the node says reaches the router."""
        ...

    def has_failed(self, request: str, node: FuzzNode) -> bool: ...

    def problem(self, kind: str, text: str) -> None: ...


class IdleWatch:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._since: dict[tuple[str, str], float] = {}
        longest_s = max(
            (node.prompt_s + node.prompt_token_s * node.max_len for node in scene.plan.nodes if node.tells_cost),
            default=0.0,
        )
        # Requests wait so long rather than slow down rows (`Headroom.keeps_rows_fast`).
        self._pace_s = HALF * PATIENCE * longest_s

    def look(self) -> None:
        scene, now = self._scene, self._scene.now
        nodes, found = list(scene.accepting()), {}
        for client in scene.clients.values():
            request = client.running
            if not isinstance(request, Request):
                continue
            for node in self._that_could(client, request, nodes):
                pair = client.ask.name, node.me.incarnation
                since = found[pair] = self._since.get(pair, now)
                if now - since > BOUND_S + self._more_s(client, request, nodes):
                    scene.problem(
                        "waits beside an idle node",
                        f"{client.ask.name} ({request.state.name}) for {now - since:.2f} s beside {node.me.incarnation}",
                    )
                    found[pair] = now
        self._since = found

    def could_serve(self, client: Client) -> FuzzNode | None:
        """A node that was idle for a while and could serve a client that just comes."""
        scene = self._scene
        able = self._able(client, self._for_prompt(client, list(scene.accepting())))
        return next((node for node in able if node.is_idle and scene.now - node.idle_since > BOUND_S), None)

    def has_row_for(self, client: Client, nodes: list[FuzzNode], num_tokens: int) -> bool:
        """Whether one of these nodes could decode it up to so many tokens."""
        large = [node for node in nodes if node.fits(num_tokens)]
        if not self._needs_pair(client, nodes):
            return bool(large)
        serving = [node for node in large if node.role != "decode"]
        return bool(_pairs(serving, [node for node in large if node.role != "prefill"]))

    def _that_could(self, client: Client, request: Request, nodes: list[FuzzNode]) -> list[FuzzNode]:
        if request.state is RequestState.WAITING and request.pause is None:
            found = [node for node in self._for_prompt(client, nodes) if self._has_nothing_to_do(client, node)]
            return self._able(client, found)
        attempt = request.attempt
        if request.state is not RequestState.RUNNING or attempt is None:
            return []
        if attempt.state is AttemptState.PREFILLING and attempt.prefill is not None:
            holder = next((node for node in nodes if node.me.incarnation == attempt.prefill.endpoint.incarnation), None)
            is_heard = holder is not None and self._scene.is_heard(holder)
            if holder is not None and is_heard and holder.has_parked(client.ask.name):
                others = self._fresh(client, nodes, lambda node: node.role != "prefill" and node is not holder)
                return self._able(client, [node for node in others if node.has_room(client.num_tokens)])
        return []

    def _has_nothing_to_do(self, client: Client, node: FuzzNode) -> bool:
        """Idle; or, where only one node is asked for, without prompts and with room for a row."""
        if node.is_idle:
            return True
        return self._mode(client) == "local" and not node.num_waiting and node.has_room(client.num_tokens)

    def _for_prompt(self, client: Client, nodes: list[FuzzNode]) -> list[FuzzNode]:
        """Nodes where the client's prompt may be computed."""
        anywhere = self._fresh(client, nodes, lambda node: True)
        if self._mode(client) == "local":
            return anywhere
        serving = self._fresh(client, nodes, lambda node: node.role != "decode")
        decoding = self._fresh(client, nodes, lambda node: node.role != "prefill")
        if self._needs_pair(client, nodes):
            if not _pairs(serving, decoding):
                serving = [node for node in nodes if node.role != "decode" and self._fits(client, node)]
                decoding = [node for node in nodes if node.role != "prefill" and self._fits(client, node)]
            # Where decode nodes are full, those that wait longer may keep others from computing ahead.
            return _pairs(serving, [node for node in decoding if node.has_room(client.num_tokens)])
        if decoding and self._scene.plan.policy != "seconds":
            # Simple policies weigh no single node against a pair, so as above.
            serving = _pairs(serving, [node for node in decoding if node.has_room(client.num_tokens)])
        excluded = client.running.job.excluded if isinstance(client.running, Request) else ()
        is_fresh = any(node.me.incarnation not in excluded for node in nodes if node.role != "decode")
        return serving if is_fresh else anywhere  # one node beats a pair with one that failed

    def _fresh(self, client: Client, nodes: list[FuzzNode], may: Callable[[FuzzNode], bool]) -> list[FuzzNode]:
        """Nodes that may, and have not failed the request. Those that have come when nothing else can be waited for:
        all are idle, and none wants to be asked later."""
        fitting = [node for node in nodes if may(node) and self._fits(client, node)]
        fresh = [node for node in fitting if not self._scene.has_failed(client.ask.name, node)]
        has_nothing_else = len(self._able(client, [node for node in fitting if node.is_idle])) == len(fitting)
        return fresh or (fitting if has_nothing_else else [])

    def _able(self, client: Client, nodes: list[FuzzNode]) -> list[FuzzNode]:
        return [node for node in nodes if self._scene.is_able(client.ask.name, node)]

    def _more_s(self, client: Client, request: Request, nodes: list[FuzzNode]) -> float:
        """How much longer it may wait for the sake of rows."""
        has_rows = any(other.num_slots_used for other in nodes)
        return self._pace_s if has_rows and not request.placement.num_placed else 0.0

    def _needs_pair(self, client: Client, nodes: list[FuzzNode]) -> bool:
        mode, is_split = self._mode(client), any(node.role != "mixed" for node in nodes)
        return mode == "remote" or (mode == "auto" and self._scene.plan.fallback == "deny" and is_split)

    def _mode(self, client: Client) -> str:
        return client.ask.mode or self._scene.plan.mode

    def _fits(self, client: Client, node: FuzzNode) -> bool:
        served = client.served
        if client.ask.replays and len(self._scene.versions) > 1:
            return False  # nobody knows here which weights it goes on with
        return node.fits(client.num_tokens) and (served is None or served.digest in node.models)


def _pairs(serving: list[FuzzNode], decoding: list[FuzzNode]) -> list[FuzzNode]:
    """The serving nodes that have another one to decode."""
    return [node for node in serving if any(other is not node for other in decoding)]
