"""Which version of the weights a request asks for, and what answers say of those that made their tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from scripted_dispatcher import EOS, MODEL, VOCAB, ScriptedDispatcher, Tokens, served
from scripted_grpc import served_grpc

from pdcluster import client as api
from pdcluster.core.errors import BadRequest, UnknownModel
from pdcluster.core.messages import FinishReason
from pdcluster.core.weights import WeightsVersion
from pdcluster_router.core.generation import Done, Force, Generation, ModelInfo, OutputWeights

OLD, NEW = WeightsVersion("base", 0, "w0"), WeightsVersion("v1", 1, "w1")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class TwoVersions(ScriptedDispatcher):
    """Of one model. A request that names none gets the older; all make tokens with both, the first two with base."""

    asked: list[tuple[str, Force | None]]
    ends: FinishReason | str | None = None

    def versions(self, model: str) -> Sequence[ModelInfo]:
        if model != MODEL:
            return ()
        info = ModelInfo(MODEL, 1_700_000_000, self.max_len, VOCAB, (EOS,), "d1", weights=NEW)
        return info, replace(info, digest="d0", weights=OLD, max_len=200)

    def models(self) -> Sequence[ModelInfo]:
        return self.versions(MODEL)[:1]

    def choose_version(self, model: str, request: str, mode: Force | None) -> ModelInfo:
        self.asked = [*getattr(self, "asked", ()), (request, mode)]
        return self.versions(model)[1]

    def _done(self, reason: FinishReason, stop_token: int | None, num_output: int) -> Done:
        made = num_output or 100
        weights = (OutputWeights.of(OLD, 0, 2), OutputWeights.of(NEW, 2, made))
        done = super()._done(reason, stop_token, num_output)
        return replace(done, weights=weights, reason=self.ends or reason)


@pytest.fixture
def dispatcher() -> TwoVersions:
    return TwoVersions()


async def ask(dispatcher: ScriptedDispatcher, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **(CHAT if "chat" in path else {"prompt": "hi"}), **fields}
    async with served(dispatcher) as url, httpx.AsyncClient() as http:
        return await http.post(url + path, json=body)


def prepared(dispatcher: ScriptedDispatcher) -> list[str]:
    """Labels that the generations were prepared for."""
    return [info.weights.label for info in (each.served for each in dispatcher.started) if info is not None]


# ---------------------------------------------------------------- asking


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({}, "base"), ({"weights": "v1"}, "v1"), ({"weights": "base"}, "base"), ({"model": f"{MODEL}@v1"}, "v1"),
        ({"model": f"{MODEL}@base"}, "base"), ({"model": f"{MODEL}@v1", "weights": "v1"}, "v1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_weights_are_asked_for_by_field_or_by_name(
    dispatcher: TwoVersions, path: str, fields: dict[str, str], label: str
) -> None:
    answer = await ask(dispatcher, path, n=2, **fields)
    assert answer.status_code == 200 and answer.json()["model"] == MODEL
    assert prepared(dispatcher) == [label] * 2, "all choices of a request have one version"
    assert len(getattr(dispatcher, "asked", [])) == (0 if fields else 1)


async def test_the_version_is_chosen_by_the_requests_id_and_mode(dispatcher: TwoVersions) -> None:
    await ask(dispatcher, pdcluster_mode="local")
    ((request, mode),) = dispatcher.asked
    assert dispatcher.started[0].request == f"{request}-0" and mode == "local"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"weights": "v9"}, 404, "weights"), ({"model": f"{MODEL}@v9"}, 404, "model"),
        ({"model": "other@v1"}, 404, "model"), ({"model": f"{MODEL}@v1", "weights": "base"}, 400, "weights"),
        ({"weights": "no label!"}, 400, "weights"), ({"weights_change": "restart"}, 400, "weights_change"),
    ],
)  # fmt: skip
async def test_unknown_weights_are_refused_by_name(
    dispatcher: TwoVersions, fields: dict[str, str], status: int, param: str
) -> None:
    answer = await ask(dispatcher, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and not dispatcher.started
    if "v9" in str(fields):
        assert "v1, base" in error["message"]


@pytest.mark.parametrize("change", ["fail", "replay", None])
async def test_a_request_says_what_becomes_of_it_when_its_weights_change(
    dispatcher: TwoVersions, change: str | None
) -> None:
    await ask(dispatcher, weights_change=change)
    assert dispatcher.started[0].weights_change == change


async def test_the_length_is_bounded_by_the_version(dispatcher: TwoVersions) -> None:
    long = [5] * 210
    assert (await ask(dispatcher, prompt=long, max_tokens=1)).status_code == 400
    assert (await ask(dispatcher, prompt=long, max_tokens=1, weights="v1")).status_code == 200


async def test_models_are_listed_with_their_versions(dispatcher: TwoVersions) -> None:
    async with served(dispatcher) as url, httpx.AsyncClient() as http:
        listed = (await http.get(url + "/v1/models")).json()["data"]
        one = (await http.get(f"{url}/v1/models/{MODEL}@base")).json()
        unknown = await http.get(f"{url}/v1/models/{MODEL}@v9")
    assert [(model["id"], model.get("weights")) for model in listed] == [
        (MODEL, None), (f"{MODEL}@v1", "v1"), (f"{MODEL}@base", "base")]  # fmt: skip
    assert (one["id"], one["max_model_len"]) == (f"{MODEL}@base", 200) and unknown.status_code == 404


async def test_a_model_of_one_version_is_listed_once() -> None:
    async with served(ScriptedDispatcher()) as url, httpx.AsyncClient() as http:
        (model,) = (await http.get(url + "/v1/models")).json()["data"]
    assert model["id"] == MODEL and "weights" not in model


# ---------------------------------------------------------------- what answers say


def said(first: int, to: int, weights: WeightsVersion) -> dict[str, object]:
    return {"from": first, "to": to, "label": weights.label, "digest": weights.digest, "epoch": weights.epoch}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_says_which_weights_made_which_tokens(dispatcher: TwoVersions, path: str) -> None:
    usage = (await ask(dispatcher, path, ignore_eos=False)).json()["usage"]
    num_output = usage["completion_tokens"]
    assert usage["pdcluster"]["weights"] == [said(0, 2, OLD), said(2, num_output, NEW)] and num_output > 2


async def test_each_choice_has_its_own(dispatcher: TwoVersions) -> None:
    report = (await ask(dispatcher, n=2)).json()["usage"]["pdcluster"]
    assert [choice["weights"][0] for choice in report["choices"]] == [said(0, 2, OLD)] * 2
    assert report["weights"] == report["choices"][0]["weights"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_last_chunk_of_a_stream_has_them(dispatcher: TwoVersions, path: str) -> None:
    text = (await ask(dispatcher, path, stream=True, stream_options={"include_usage": True})).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert events[-1]["usage"]["pdcluster"]["weights"][0] == said(0, 2, OLD)


@pytest.mark.parametrize(
    ("stop", "expected"), [("h", [said(0, 1, OLD)]), ("l", [said(0, 2, OLD), said(2, 3, NEW)])]
)  # fmt: skip
async def test_a_text_cut_by_a_stop_string_has_the_weights_of_its_own_tokens(
    dispatcher: TwoVersions, stop: str, expected: list[dict[str, object]]
) -> None:
    usage = (await ask(dispatcher, stop=stop)).json()["usage"]
    ranges = usage["pdcluster"]["weights"]
    assert ranges[-1]["to"] == usage["completion_tokens"] and ranges[0]["from"] == 0
    assert [each["label"] for each in ranges] == [each["label"] for each in expected][: len(ranges)]


async def test_grpc_says_the_same(dispatcher: TwoVersions) -> None:
    async with served_grpc(dispatcher) as address, api.AsyncClient(address) as client:
        outputs = [output async for output in client.generate("hi", weights="v1", weights_change="replay")]
        models = [model.id for model in await client.models()]
        with pytest.raises(UnknownModel, match="v1, base"):
            await client.complete("hi", model=f"{MODEL}@v9")
        with pytest.raises(BadRequest, match="weights_change"):
            await client.complete("hi", weights_change="restart")  # type: ignore[typeddict-item]
    assert prepared(dispatcher) == ["v1"] and dispatcher.started[0].weights_change == "replay"
    assert all(not output.weights for output in outputs[:-1])
    num_output = outputs[-1].usage.completion_tokens if outputs[-1].usage else 0
    assert outputs[-1].weights == (
        api.WeightsRange(0, 2, "base", "w0", 0), api.WeightsRange(2, num_output, "v1", "w1", 1)
    )  # fmt: skip
    assert models == [MODEL, f"{MODEL}@v1", f"{MODEL}@base"]


# ---------------------------------------------------------------- answers that the router ends


def some(_: Generation) -> list[Tokens]:
    return [Tokens((60,)), Tokens((61,)), Tokens((62,))]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_aborted_answer_ends_well_with_what_it_has(
    dispatcher: TwoVersions, path: str, has_tokens: bool
) -> None:
    dispatcher.script = some if has_tokens else lambda _: []
    dispatcher.ends = "abort"
    answer = await ask(dispatcher, path)
    (choice,) = answer.json()["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert answer.status_code == 200 and choice["finish_reason"] == "abort" and bool(text) == has_tokens
    assert answer.json()["usage"]["completion_tokens"] == (3 if has_tokens else 0)
    stream = (await ask(dispatcher, path, stream=True)).text
    assert '"finish_reason":"abort"' in stream and stream.endswith("data: [DONE]\n\n")


async def test_an_aborted_answer_over_grpc(dispatcher: TwoVersions) -> None:
    dispatcher.script, dispatcher.ends = some, "abort"
    async with served_grpc(dispatcher) as address, api.AsyncClient(address) as client:
        answer = await client.complete("hi")
    assert answer.finish_reasons == ("abort",) and len(answer.token_ids[0]) == 3
    assert answer.weights == ((api.WeightsRange(0, 2, "base", "w0", 0), api.WeightsRange(2, 3, "v1", "w1", 1)),)
