"""A cluster whose decode node is killed in the middle of a program's stream."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc
from processes import EXACT, Up

from pdcluster.rpc.admin_pb2 import ListNodesRequest, ListRequestsRequest
from pdcluster.rpc.admin_pb2_grpc import AdminStub

# A program streams an answer, calls this at each piece of text, and gives the whole text.
OnPiece = Callable[[], None]
Program = Callable[[OnPiece], str]

ARGUMENTS = ("--prefill", "1", "--decode", "2", *EXACT, "--set", "router.tool_format=hermes")
NUM_NODES = 3
# So many pieces come before the kill: the stream runs on the decode node by then.
KILL_AFTER = 8
# Its greedy answer has some 660 tokens and an end of its own: some clients raise where a stream ends by length.
LONG_ASKED = "Write a function that uses `argparse`."
LONG_TOKENS = 4000
ADMIN_S = 10.0
WAIT_S = 90.0


class Cluster(Up):
    """A greedy answer is the same over a kill: nodes compute in float32."""

    def __init__(self, python: str, ready_s: float) -> None:
        super().__init__(*ARGUMENTS, python=python, ready_s=ready_s)

    def over_a_kill(self, program: Program) -> str:
        """Runs it undisturbed, then with a kill of the decode node; gives the text that both streamed."""
        self._wait_for(self._are_all_ready, "all nodes")
        undisturbed = program(lambda: None)
        assert undisturbed, "the program streamed nothing"
        before, pieces, killed = self._retries(), 0, []

        def on_piece() -> None:
            nonlocal pieces
            pieces += 1
            if pieces == KILL_AFTER:
                killed.append(self._kill_busy_decode())

        text = program(on_piece)
        assert killed, f"only {pieces} pieces came: {text!r}"
        assert pieces > KILL_AFTER, f"nothing came after {killed[0]} was killed"
        assert text == undisturbed
        self._wait_for(lambda: self._retries() > before, f"a new attempt after {killed[0]} was killed")
        return text

    def _are_all_ready(self) -> bool:
        """A node that was killed is started again."""
        with grpc.insecure_channel(self.admin) as channel:
            nodes = AdminStub(channel).ListNodes(ListNodesRequest(), timeout=ADMIN_S).nodes
        return sum(node.state == "ready" for node in nodes) == NUM_NODES

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}:\n{self.output()}"
            time.sleep(0.05)

    def _kill_busy_decode(self) -> str:
        """The program's request is the only one."""
        with grpc.insecure_channel(self.admin) as channel:
            listed = AdminStub(channel).ListRequests(ListRequestsRequest(), timeout=ADMIN_S)
        (request,) = listed.requests
        assert request.decode.startswith("decode-"), f"its tokens come from {request.decode or request.prefill}"
        self.kill(request.decode)
        return request.decode

    def _retries(self) -> float:
        """Attempts beyond the first one, of choices that ended well."""
        samples = self.metrics()
        choices = sum(value for name, value in samples.items() if name.startswith("pdcluster_choices_total"))
        return samples["pdcluster_attempts_total"] - choices
