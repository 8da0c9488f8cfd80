"""Requests of every feature, and what each answers undisturbed. Under faults the same request must answer the same."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from google.protobuf import json_format

from pdcluster.rpc import inference_pb2 as pb
from pdcluster.rpc import inference_pb2_grpc as stubs
from tests.chaos.cluster import ChaosCluster, ChildProcess

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find_person", "description": "finds", "parameters": PERSON}}
# Until an answer. Clusters whose nodes start for minutes get more.
LIMIT_S = 150.0


@dataclass(frozen=True)
class ChaosRequest:
    """One request of the load.

    kind: the feature that it is there for.
    path: of HTTP, or "grpc".
    """

    kind: str
    path: str
    body: dict[str, Any]


def requests_of(seed: int, count: int, *, num_output: int = 120) -> list[ChaosRequest]:
    """Requests of all kinds, drawn from the seed."""
    chance = random.Random(seed)
    makers = [_completion, _stream, _choices, _penalties, _logprobs, _long, _chat, _grammar, _tools, _grpc]
    return [makers[number % len(makers)](chance, num_output) for number in range(count)]


def _prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(5, 2000) for _ in range(length)]


def _body(chance: random.Random, num_output: int, **fields: Any) -> dict[str, Any]:
    own = {
        "prompt": _prompt(chance, chance.randrange(20, 200)),
        "max_tokens": chance.randrange(num_output // 2, num_output + 1),
        "seed": chance.randrange(1 << 30),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return {**own, **fields}


def _completion(chance: random.Random, num_output: int) -> ChaosRequest:
    return ChaosRequest("completion", "/v1/completions", _body(chance, num_output, temperature=0))


def _stream(chance: random.Random, num_output: int) -> ChaosRequest:
    return ChaosRequest("stream", "/v1/completions", _body(chance, num_output, stream=True))


def _choices(chance: random.Random, num_output: int) -> ChaosRequest:
    return ChaosRequest("choices", "/v1/completions", _body(chance, num_output, n=3, stream=chance.random() < 0.5))


def _penalties(chance: random.Random, num_output: int) -> ChaosRequest:
    shaping = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "top_p": 0.9, "top_k": 50}
    return ChaosRequest("penalties", "/v1/completions", _body(chance, num_output, stream=True, **shaping))


def _logprobs(chance: random.Random, num_output: int) -> ChaosRequest:
    return ChaosRequest(
        "logprobs", "/v1/completions", _body(chance, num_output, logprobs=2, echo=chance.random() < 0.3)
    )


def _long(chance: random.Random, num_output: int) -> ChaosRequest:
    prompt = _prompt(chance, chance.randrange(1500, 3000))
    return ChaosRequest("long", "/v1/completions", _body(chance, num_output, prompt=prompt, stream=True))


def _messages(chance: random.Random) -> list[dict[str, str]]:
    words = " ".join(chance.choice(("red", "tree", "house", "seven", "runs", "under")) for _ in range(30))
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": words}]


def _chat_body(chance: random.Random, num_output: int, **fields: Any) -> dict[str, Any]:
    own = {"messages": _messages(chance), "max_completion_tokens": num_output, "seed": chance.randrange(1 << 30)}
    return {**own, **fields}


def _chat(chance: random.Random, num_output: int) -> ChaosRequest:
    fields = {"stream": chance.random() < 0.5, "ignore_eos": True}
    return ChaosRequest("chat", "/v1/chat/completions", _chat_body(chance, num_output, **fields))


def _grammar(chance: random.Random, num_output: int) -> ChaosRequest:
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    fields = {"response_format": shape, "n": chance.randrange(1, 3), "stream": chance.random() < 0.5}
    return ChaosRequest("grammar", "/v1/chat/completions", _chat_body(chance, num_output, **fields))


def _tools(chance: random.Random, num_output: int) -> ChaosRequest:
    fields = {"tools": [TOOL], "tool_choice": "required", "stream": chance.random() < 0.5}
    return ChaosRequest("tools", "/v1/chat/completions", _chat_body(chance, num_output, **fields))


def _grpc(chance: random.Random, num_output: int) -> ChaosRequest:
    body = _body(chance, num_output)
    prompt = body.pop("prompt")
    del body["return_token_ids"]
    return ChaosRequest("grpc", "grpc", {**body, "token_ids": {"ids": prompt}, "n": chance.randrange(1, 3)})


# ---------------------------------------------------------------- answers


class AnswerFailed(Exception):
    """The client got an error, or half an answer."""


class NotAccepted(AnswerFailed):
    """Nobody listens at the router's address: the request was never accepted."""


async def answer_of(
    client: httpx.AsyncClient, router: ChildProcess, request: ChaosRequest, limit_s: float = LIMIT_S
) -> object:
    """What the request answers, without ids, times and routes. Raises AnswerFailed."""
    try:
        async with asyncio.timeout(limit_s):
            if request.path == "grpc":
                return await _grpc_answer(router, request, limit_s)
            if request.body.get("stream"):
                return await _stream_answer(client, router, request)
            reply = await client.post(f"{router.url}{request.path}", json=request.body)
            if reply.status_code != 200:
                raise AnswerFailed(f"{reply.status_code}: {reply.text[:500]}")
            return [_bare(choice) for choice in reply.json()["choices"]]
    except TimeoutError:
        raise AnswerFailed(f"hung: no answer within {limit_s:g} s") from None
    except httpx.ConnectError as error:
        raise NotAccepted(str(error)) from error
    except httpx.HTTPError as error:
        raise AnswerFailed(f"{type(error).__name__}: {error}") from error


def _bare(choice: dict[str, Any]) -> dict[str, Any]:
    """Ids of tool calls are random."""
    for call in (choice.get("message") or {}).get("tool_calls") or ():
        call.pop("id", None)
    return choice


async def _stream_answer(client: httpx.AsyncClient, router: ChildProcess, request: ChaosRequest) -> object:
    """Choices as one would put their pieces together, however they were cut."""
    choices: dict[int, Counter[str]] = {}
    texts: dict[tuple[int, str], list[Any]] = {}
    is_done = False
    async with client.stream("POST", f"{router.url}{request.path}", json=request.body) as reply:
        if reply.status_code != 200:
            raise AnswerFailed(f"{reply.status_code}: {(await reply.aread())[:500]!r}")
        async for line in reply.aiter_lines():
            if line.startswith("data: [DONE]"):
                is_done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise AnswerFailed(f"stream: {event['error']}")
                for choice in event["choices"]:
                    _add(choices, texts, choice)
    if not is_done:
        raise AnswerFailed("the stream ended without [DONE]")
    return sorted(
        (index, name, "".join(map(str, parts)) if name != "tokens" else parts) for (index, name), parts in texts.items()
    )


def _add(choices: dict[int, Counter[str]], texts: dict[tuple[int, str], list[Any]], choice: dict[str, Any]) -> None:
    index, delta = choice["index"], choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or ""
    if text:
        texts.setdefault((index, "text"), []).append(text)
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        texts.setdefault((index, "call"), []).append((function.get("name") or "") + (function.get("arguments") or ""))
    if choice.get("token_ids"):
        texts.setdefault((index, "tokens"), []).extend(choice["token_ids"])
    if choice.get("finish_reason"):
        texts.setdefault((index, "finish"), []).append(choice["finish_reason"])


async def _grpc_answer(router: ChildProcess, request: ChaosRequest, limit_s: float) -> object:
    texts: dict[int, list[Any]] = {}
    message = json_format.ParseDict(request.body, pb.GenerateRequest())
    try:
        async with router.edges.channel(router.facts["grpc"]) as channel:
            calls = stubs.InferenceStub(channel)
            async for reply in calls.Generate(message, timeout=limit_s, metadata=router.edges.metadata):
                own = texts.setdefault(reply.index, [])
                own.extend(reply.token_ids)
                if reply.finish_reason:
                    own.append(reply.finish_reason)
    except grpc.aio.AioRpcError as error:
        if "failed to connect" in (error.details() or "").lower():
            raise NotAccepted(str(error.details())) from error
        raise AnswerFailed(f"grpc {error.code().name}: {error.details()}") from error
    return sorted(texts.items())


def answer_tokens(answer: Any) -> list[list[int]]:
    """The token ids of each choice that `answer_of` gave."""
    if answer and isinstance(answer[0], dict):
        return [choice["token_ids"] for choice in answer]
    if answer and len(answer[0]) == 3:
        return [parts for _, name, parts in answer if name == "tokens"]
    return [[part for part in parts if isinstance(part, int)] for _, parts in answer]


def answer_texts(answer: Any) -> list[str]:
    """The text or tool call of each choice that `answer_of` gave."""
    if answer and isinstance(answer[0], dict):
        messages = [choice["message"] for choice in answer]
        calls = [call["function"]["arguments"] for each in messages for call in each.get("tool_calls") or ()]
        return calls or [message["content"] for message in messages]
    return [parts for _, name, parts in answer if name in ("text", "call")]


# ---------------------------------------------------------------- the load

# Whether an answer is right, beside the undisturbed one.
IsRight = Callable[[ChaosRequest, object, object], bool]


def _is_same(request: ChaosRequest, answer: object, undisturbed: object) -> bool:
    return answer == undisturbed


@dataclass
class LoadReport:
    """What became of the requests."""

    num_right: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    # Those whose own router was killed, or did not listen because it was being started again.
    excused: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.lost or self.hung)


class ChaosLoad:
    """Sends requests and compares their answers with those from before the faults."""

    def __init__(
        self,
        cluster: ChaosCluster,
        requests: Sequence[ChaosRequest],
        seed: int,
        is_right: IsRight = _is_same,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._cluster, self._requests, self._is_right = cluster, list(requests), is_right
        self._chance, self._limit_s = random.Random(seed), limit_s
        self._twins: list[object] = []
        self.report = LoadReport()
        self._is_over = asyncio.Event()
        self._client = cluster.edges.client(timeout=httpx.Timeout(limit_s), limits=httpx.Limits(max_connections=None))

    async def learn(self) -> None:
        """Ask everything once, undisturbed."""
        router = next(iter(self._cluster.routers.values()))
        models = (await self._client.get(f"{router.url}/v1/models")).json()["data"]
        for request in self._requests:
            request.body["model"] = models[0]["id"]
        limit = asyncio.Semaphore(8)

        async def ask(request: ChaosRequest) -> object:
            async with limit:
                return await answer_of(self._client, router, request, self._limit_s)

        self._twins = list(await asyncio.gather(*map(ask, self._requests)))

    async def run(self, clients: int) -> None:
        """Until `end`: so many clients, each with one request at a time."""
        await asyncio.gather(*(self._run_client() for _ in range(clients)))

    def end(self) -> None:
        self._is_over.set()

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, number: int, router: ChildProcess) -> None:
        """Ask one request, and note what became of it."""
        request, report, started = self._requests[number], self.report, time.monotonic()
        num_kills, was_ready = router.num_kills, router.is_ready
        label = f"{request.kind} #{number} at {router.name}"
        try:
            answer = await answer_of(self._client, router, request, self._limit_s)
        except AnswerFailed as error:
            what = f"{label} after {time.monotonic() - started:.1f} s: {error}"
            is_refused = isinstance(error, NotAccepted) and not (was_ready and router.is_ready)
            if router.num_kills != num_kills or is_refused:
                report.excused.append(what)
            else:
                (report.hung if str(error).startswith("hung") else report.lost).append(what)
            return
        report.slowest_s = max(report.slowest_s, time.monotonic() - started)
        if await asyncio.to_thread(self._is_right, request, answer, self._twins[number]):
            report.num_right += 1
            report.by_kind[request.kind] += 1
        else:
            report.wrong.append(f"{label}: {str(answer)[:400]} instead of {str(self._twins[number])[:400]}")

    async def _run_client(self) -> None:
        while not self._is_over.is_set():
            running = [router for router in self._cluster.routers.values() if router.is_ready]
            if not running:
                await asyncio.sleep(0.2)
                continue
            await self.ask(self._chance.randrange(len(self._requests)), self._chance.choice(running))
