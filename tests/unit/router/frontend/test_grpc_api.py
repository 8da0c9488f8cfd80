"""The gRPC front door over a real socket, asked by the package's own clients, by one made from the .proto alone, and
through reflection."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted_dispatcher import EOS, MAX_LEN, MODEL, ROUTE, TEXT, ScriptedDispatcher, Tokens, Wait, says, until
from scripted_grpc import protoc, served_grpc
from tiny_tokenizers import byte_level_files

from pdcluster import client as api
from pdcluster.api.text.model_text import TextModel
from pdcluster.core.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    NodeLost,
    Overloaded,
    PdclusterError,
    Unavailable,
    UnknownModel,
)
from pdcluster_router.core.generation import ModelInfo
from pdcluster_router.core.tenants import Entry, Tenants
from pdcluster_router.frontend.grpc import SERVICE, GrpcSettings, Inference, listening
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import router_metrics

ROOT = Path(__file__).parents[4]


@pytest.fixture
def dispatcher() -> ScriptedDispatcher:
    return ScriptedDispatcher()


@pytest.fixture
async def address(dispatcher: ScriptedDispatcher) -> AsyncIterator[str]:
    async with served_grpc(dispatcher) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[api.AsyncClient]:
    async with api.AsyncClient(address) as client:
        yield client


async def failure(client: api.AsyncClient, prompt: api.Prompt = "hi", **options: object) -> PdclusterError:
    with pytest.raises(PdclusterError) as caught:
        await client.complete(prompt, **options)  # type: ignore[arg-type]
    return caught.value


# ---------------------------------------------------------------- what comes back


async def test_text_streams_token_by_token_and_ends_with_reason_and_usage(client: api.AsyncClient) -> None:
    outputs = [output async for output in client.generate("hi", max_tokens=50)]
    assert "".join(output.text for output in outputs) == "hello world"
    assert len(outputs) > 3
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == [*TEXT.encode("hello world", add_special_tokens=False), EOS]
    assert [output.position for output in outputs if output.token_ids] == list(range(len(tokens)))
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["stop"]
    assert outputs[-1].usage == api.Usage(len(TEXT.encode("hi", add_special_tokens=True)), len(tokens), 3)


async def test_the_first_message_carries_the_route_and_the_time_to_first_token(client: api.AsyncClient) -> None:
    outputs = [output async for output in client.generate("hi", max_tokens=5)]
    assert outputs[0].route == api.Route("remote", ROUTE.prefill or "", ROUTE.decode or "", "shm")
    assert (
        outputs[0].timings is not None
        and outputs[0].timings.ttft_s is not None
        and outputs[0].timings.prefill_s is None
    )
    assert (
        outputs[-1].timings is not None and outputs[-1].timings.prefill_s == 0.5 and outputs[-1].timings.attempts == 1
    )


async def test_token_ids_and_every_sampling_field_reach_the_dispatcher(
    client: api.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    prompt = list(range(5, 25))
    await client.complete(
        prompt, model=MODEL, max_tokens=7, min_tokens=2, temperature=0.7, top_p=0.9, top_k=12, min_p=0.05, seed=-3,
        stop=["zzz"],
        stop_token_ids=[9], ignore_eos=True, logprobs=2, cache_salt="tenant", timeout_s=30.0,
    )  # fmt: skip
    (generation,) = dispatcher.started
    sampling = generation.sampling
    assert generation.token_ids.tolist() == prompt and generation.salt == b"tenant"
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (7, 2, 0.7, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == (
        12,
        0.05,
        (9,),
        True,
        2,
    )
    assert sampling.seed == -3 & (2**63 - 1)
    assert 0 < generation.deadline_s < 31.0, "the call's deadline, rounded up on the wire, is the request's"


async def test_a_prompt_cache_key_names_the_conversation(
    client: api.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    await client.complete("hi", prompt_cache_key="talk")
    await client.complete("hi")
    assert [generation.session for generation in dispatcher.started] == ["talk", ""]


class TwoNames(ScriptedDispatcher):
    """Of one model under two names, or of two models."""

    other = TEXT

    def models(self) -> Sequence[ModelInfo]:
        (info,) = super().models()
        return [info, replace(info, id="other")]

    def text(self, model: str) -> TextModel:
        return TEXT if model == MODEL else self.other


async def test_the_model_need_not_be_named_where_all_names_are_its_own() -> None:
    dispatcher = TwoNames()
    async with served_grpc(dispatcher) as address, api.AsyncClient(address) as client:
        assert (await client.complete("hi", max_tokens=50)).texts == ("hello world",)
        assert dispatcher.started[0].model == MODEL
        dispatcher.other = TextModel(byte_level_files())
        error = await failure(client)
        assert isinstance(error, BadRequest) and "must be one of tiny, other" in str(error)


async def test_a_schema_that_allows_everything_is_one(client: api.AsyncClient, dispatcher: ScriptedDispatcher) -> None:
    for schema in ({}, "{}"):
        await client.complete("hi", structured_outputs=api.Structured(json=schema))
    grammars = [generation.sampling.grammar for generation in dispatcher.started]
    assert grammars[0] is not None and grammars[0] == grammars[1]
    for asked in (api.Structured(), api.Structured(json={}, regex="a")):
        assert "exactly one of" in str(await failure(client, structured_outputs=asked))


async def test_left_out_fields_mean_what_they_mean_over_http(
    client: api.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    await client.complete("hi")
    (generation,) = dispatcher.started
    assert (
        generation.sampling.max_tokens == 16
        and generation.sampling.temperature == 1.0
        and 60.0 < generation.deadline_s <= 600.0
    )


async def test_penalties_biases_and_bad_words_reach_the_nodes(
    client: api.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    options = {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {7: 5.0},
        "bad_words": ["world"],
    }
    for prompt in ("hi", [api.Message("user", "hi")]):
        await client.complete(prompt, **options)
        shaping = dispatcher.started[-1].sampling.shaping
        assert shaping is not None
        assert (shaping.repetition, shaping.presence, shaping.frequency, shaping.biases) == (
            1.2,
            0.5,
            -0.5,
            ((7, 5.0),),
        )
        assert tuple(TEXT.encode("world", add_special_tokens=False)) in shaping.bad_words


async def test_prompt_logprobs_come_without_an_echo(client: api.AsyncClient) -> None:
    prompt = TEXT.encode("hi there", add_special_tokens=False)
    outputs = [output async for output in client.generate(list(prompt), prompt_logprobs=2)]
    assert [entry.token_id for entry in outputs[0].prompt_logprobs] == list(prompt)
    assert outputs[0].prompt_logprobs[0].logprob is None and len(outputs[0].prompt_logprobs[1].top) == 2
    assert not outputs[0].logprobs


async def test_logprobs_echo_and_prompt_ids_come_when_asked_for(client: api.AsyncClient) -> None:
    outputs = [
        output
        async for output in client.generate("hi you", max_tokens=3, logprobs=2, echo=True, return_prompt_token_ids=True)
    ]
    prompt = TEXT.encode("hi you", add_special_tokens=True)
    assert outputs[0].text.startswith("hi you") and list(outputs[0].prompt_token_ids) == list(prompt)
    assert [found.logprob for found in outputs[0].prompt_logprobs] == [None] + [-0.5] * (len(prompt) - 1)
    assert all(len(found.top) == 2 and found.logprob == -0.5 for output in outputs for found in output.logprobs)
    assert [len(output.logprobs) for output in outputs] == [len(output.token_ids) for output in outputs]


async def test_choices_come_apart_again(client: api.AsyncClient, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = lambda generation: says(f"choice {generation.sampling.choice}")
    done = await client.complete("hi", n=3, max_tokens=40)
    assert done.texts == ("choice 0", "choice 1", "choice 2") and done.finish_reasons == ("stop",) * 3
    assert done.usage.completion_tokens == sum(map(len, done.token_ids))


async def test_a_chat_goes_through_the_template(client: api.AsyncClient, dispatcher: ScriptedDispatcher) -> None:
    await client.complete([api.Message("system", "be brief"), api.Message("user", "hi")], max_tokens=4)
    rendered = TEXT.render_chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    assert dispatcher.started[0].token_ids == TEXT.encode(rendered, add_special_tokens=False)


async def test_a_stop_string_ends_and_cancels_the_generation(
    client: api.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = lambda _: [*says("hello world", "length"), Wait(asyncio.Event())]
    done = await client.complete("hi", stop=["wor"], max_tokens=50)
    assert done.texts == ("hello ",) and done.finish_reasons == ("stop",)
    await until(lambda: len(dispatcher.cancelled) == 1)


async def test_models_are_listed(client: api.AsyncClient) -> None:
    assert [model.id for model in await client.models()] == [MODEL]
    assert (await client.models())[0].max_len == MAX_LEN


def test_the_blocking_client_says_the_same(tmp_path: Path) -> None:
    async def ask() -> None:
        async with served_grpc(ScriptedDispatcher()) as address:
            assert await asyncio.to_thread(blocking, address) == ("hello world", [MODEL])

    def blocking(address: str) -> tuple[str, list[str]]:
        with api.Client(address) as client:
            text = "".join(output.text for output in client.generate("hi", max_tokens=50))
            assert client.complete("hi", max_tokens=50).texts == (text,)
            return text, [model.id for model in client.models()]

    asyncio.run(ask())


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "words"),
    [
        ("hi", {"model": "nope"}, UnknownModel, "nope"),
        ("", {}, BadRequest, "empty"),
        ([], {}, BadRequest, "token_ids is empty"),
        ([10**6], {}, BadRequest, "no token id of this model"),
        ("hi", {"max_tokens": 0}, BadRequest, "max_tokens"),
        ("hi", {"max_tokens": 10**6}, BadRequest, "max_tokens"),
        ("hi", {"temperature": 3.0}, BadRequest, "temperature must be at most 2.0"),
        ("hi", {"temperature": float("nan")}, BadRequest, "temperature"),
        ("hi", {"top_p": 0.0}, BadRequest, "top_p"),
        ("hi", {"n": 500}, BadRequest, "n must be at most 128"),
        ("hi", {"logprobs": 1025}, BadRequest, "logprobs must be at most 1024"),
        ("hi", {"stop": [""]}, BadRequest, "stop has an empty string"),
        ("hi", {"max_tokens": -1}, BadRequest, "cannot be sent"),
        ("hi", {"frequency_penalty": 2.5}, BadRequest, "frequency_penalty must be at most 2.0"),
        ("hi", {"presence_penalty": float("nan")}, BadRequest, "presence_penalty"),
        ("hi", {"repetition_penalty": float("nan")}, BadRequest, "repetition_penalty"),
        ("hi", {"repetition_penalty": 1e-30}, BadRequest, "repetition_penalty must be at least 0.01"),
        ("hi", {"logit_bias": {5: float("nan")}}, BadRequest, "logit_bias of token 5 is nan"),
        ("hi", {"logit_bias": {5: 101.0}}, BadRequest, "logit_bias of token 5 is 101"),
        ("hi", {"bad_words": [" "]}, BadRequest, "bad_words[0]"),
        ("hi", {"prompt_logprobs": 1025}, BadRequest, "prompt_logprobs must be at most 1024"),
        ([api.Message("user", "hi"), 3], {}, BadRequest, "mixes kinds"),
        ([api.Message("wizard", "hi")], {}, BadRequest, "messages[0].role"),
        ([api.Message("user", "hi")], {"echo": True}, BadRequest, "echo"),
    ],
)
async def test_a_bad_request_says_what_to_change(
    client: api.AsyncClient,
    dispatcher: ScriptedDispatcher,
    prompt: api.Prompt,
    options: dict[str, object],
    kind: type[PdclusterError],
    words: str,
) -> None:
    error = await failure(client, prompt, **options)
    assert type(error) is kind and words in str(error)
    assert not dispatcher.started


async def test_a_call_without_a_prompt_is_refused(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        generate = channel.unary_stream(f"/{SERVICE}/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generate(b""):
                raise AssertionError("nothing was asked")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "no prompt" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (Overloaded("all are busy", 2.5), Overloaded),
        (Unavailable("nobody"), Unavailable),
        (NodeLost("gone"), Unavailable),
        (DeadlineExceeded("too late"), DeadlineExceeded),
        (ValueError("a bug"), Unavailable),
    ],
)
@pytest.mark.parametrize("after", ["", "some"])
async def test_errors_of_the_dispatcher_become_status_codes(
    client: api.AsyncClient, dispatcher: ScriptedDispatcher, raised: Exception, kind: type[PdclusterError], after: str
) -> None:
    dispatcher.script = lambda _: [*(says(after, "length") if after else []), raised]
    error = await failure(client, max_tokens=50)
    assert isinstance(error, kind) or (isinstance(raised, ValueError) and "internal error" in str(error))
    assert "a bug" not in str(error), "what a bug says may hold a user's data"


async def test_busy_says_for_how_long(client: api.AsyncClient, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = lambda _: [Overloaded("all are busy", 2.5)]
    error = await failure(client)
    assert isinstance(error, Overloaded) and error.retry_after_s == 2.5


async def test_a_router_with_all_places_taken_refuses_at_once(dispatcher: ScriptedDispatcher) -> None:
    never = asyncio.Event()
    dispatcher.script = lambda _: [Wait(never)]
    async with served_grpc(dispatcher, max_requests=1) as address, api.AsyncClient(address) as client:
        first = asyncio.create_task(client.complete("hi"))
        await until(lambda: len(dispatcher.started) == 1)
        assert isinstance(await failure(client), Overloaded)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: len(dispatcher.cancelled) == 1)
        dispatcher.script = lambda _: says("ok")
        assert (await client.complete("hi", max_tokens=9)).texts == ("ok",), "a place comes back with its call"


async def test_a_client_that_leaves_cancels_the_generation(
    client: api.AsyncClient, dispatcher: ScriptedDispatcher
) -> None:
    never = asyncio.Event()
    dispatcher.script = lambda _: [*says("some", "length"), Wait(never)]
    outputs = client.generate("hi", max_tokens=50)
    await anext(outputs)
    await outputs.aclose()
    await until(lambda: dispatcher.cancelled)
    assert dispatcher.cancelled == [each.request for each in dispatcher.started] and not dispatcher.ended


async def test_a_deadline_cancels_the_generation(client: api.AsyncClient, dispatcher: ScriptedDispatcher) -> None:
    never = asyncio.Event()
    dispatcher.script = lambda _: [Wait(never)]
    assert isinstance(await failure(client, timeout_s=0.2), DeadlineExceeded)
    await until(lambda: len(dispatcher.cancelled) == 1)


async def test_calls_that_ran_out_of_time_and_clients_that_left_are_counted_apart(
    dispatcher: ScriptedDispatcher,
) -> None:
    metrics, never = router_metrics(), asyncio.Event()
    dispatcher.script = lambda _: [*says("some", "length"), Wait(never)]

    def counted(code: str) -> float:
        return (
            metrics.registry.get_sample_value("pdcluster_grpc_requests_total", {"method": "Generate", "code": code})
            or 0.0
        )

    async with served_grpc(dispatcher, metrics=metrics) as address, api.AsyncClient(address) as client:
        late = await asyncio.gather(*(failure(client, timeout_s=timeout_s) for timeout_s in (0.2, 0.613, 1.234)))
        assert all(isinstance(error, DeadlineExceeded) for error in late)
        await until(lambda: counted("DEADLINE_EXCEEDED") == 3)
        assert metrics.registry.get_sample_value("pdcluster_client_disconnects_total") == 0
        outputs = client.generate("hi", max_tokens=50, timeout_s=60.0)
        await anext(outputs)
        await outputs.aclose()
        await until(lambda: counted("CANCELLED") == 1)
        assert (
            metrics.registry.get_sample_value("pdcluster_client_disconnects_total") == 1
            and counted("DEADLINE_EXCEEDED") == 3
        )


async def test_a_call_that_ends_with_its_server_was_not_left_by_its_client(dispatcher: ScriptedDispatcher) -> None:
    metrics, never = router_metrics(), asyncio.Event()
    dispatcher.script = lambda _: [*says("some", "length"), Wait(never)]
    async with AsyncExitStack() as server:
        address = await server.enter_async_context(served_grpc(dispatcher, metrics=metrics))
        async with api.AsyncClient(address) as client:
            calling = asyncio.ensure_future(failure(client, timeout_s=60.0))
            await until(lambda: dispatcher.started)
            await server.aclose()
            await calling
    await until(
        lambda: (
            metrics.registry.get_sample_value(
                "pdcluster_grpc_requests_total", {"method": "Generate", "code": "CANCELLED"}
            )
            == 1
        )
    )
    assert metrics.registry.get_sample_value("pdcluster_client_disconnects_total") == 0


async def test_a_client_that_does_not_read_is_left_and_its_generation_cancelled(dispatcher: ScriptedDispatcher) -> None:
    """Its own buffers are small, as a window that has not grown."""
    words, never = Tokens(tuple(TEXT.encode("word " * 10, add_special_tokens=False))), asyncio.Event()
    dispatcher.max_len = 2**20
    dispatcher.script = lambda _: [*[words] * 4000, Wait(never)]
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        served_grpc(dispatcher, GrpcSettings(stall_s=0.3)) as address,
        grpc.aio.insecure_channel(address, options=window) as channel,
    ):
        request = api._request("hi", {"max_tokens": 500_000})
        call = channel.unary_stream(f"/{SERVICE}/Generate", request_serializer=type(request).SerializeToString)(request)
        await call.read()
        await until(lambda: len(dispatcher.cancelled) == 1)
        call.cancel()
    assert dispatcher.cancelled == [dispatcher.started[0].request] and not dispatcher.ended


async def test_a_client_that_never_reads_keeps_its_call_no_longer_than_its_connection_may_live(
    dispatcher: ScriptedDispatcher,
) -> None:
    """The one place for calls is free again while the client still reads nothing, not even why its call ended."""
    words, never = Tokens(tuple(TEXT.encode("word " * 10, add_special_tokens=False))), asyncio.Event()
    dispatcher.max_len = 2**20
    dispatcher.script = lambda _: [*[words] * 4000, Wait(never)]
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    settings = GrpcSettings(stall_s=0.2, last_word_s=0.1, connection_age_s=0.5, deadline_s=1.0, max_calls=1)
    async with (
        served_grpc(dispatcher, settings) as address,
        grpc.aio.insecure_channel(address, options=window) as channel,
    ):
        request = api._request("hi", {"max_tokens": 500_000})
        stalled = channel.unary_stream(f"/{SERVICE}/Generate", request_serializer=type(request).SerializeToString)(
            request
        )
        await stalled.read()
        await until(lambda: len(dispatcher.cancelled) == 1)
        dispatcher.script = lambda _: says("ok")
        async with api.AsyncClient(address) as other:
            async with asyncio.timeout(20):
                while True:
                    try:
                        assert (await other.complete("hi", max_tokens=9)).texts == ("ok",)
                        break
                    except PdclusterError:  # RESOURCE_EXHAUSTED until then
                        await asyncio.sleep(0.05)
        stalled.cancel()


async def test_the_request_id_of_the_client_is_echoed(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        request = api._request("hi", {"max_tokens": 3})
        call = channel.unary_stream(f"/{SERVICE}/Generate", request_serializer=type(request).SerializeToString)
        for sent, back in ((("x-request-id", "mine-1"),), "mine-1"), ((("x-request-id", "x" * 500),), None):
            running = call(request, metadata=sent)
            headers = dict(await running.initial_metadata())
            assert headers["x-request-id"] == back if back else len(headers["x-request-id"]) == 24
            running.cancel()


async def test_with_tenants_a_key_is_asked_for_and_names_whose_request_it_is(dispatcher: ScriptedDispatcher) -> None:
    places = Places(4, Tenants({"acme": Entry(keys=["sk-acme-0001"], weight=3.0, priority=-1)}))
    servicer = Inference(dispatcher, GrpcSettings(), router_metrics(), places)
    async with listening(servicer, dispatcher, "127.0.0.1:0", GrpcSettings(), drain_s=1.0) as address:
        for key in (None, "sk-acme-0002"):
            async with api.AsyncClient(address, key) as stranger:
                assert "UNAUTHENTICATED" in str(await failure(stranger))
                with pytest.raises(PdclusterError, match="UNAUTHENTICATED"):
                    await stranger.models()
        assert dispatcher.started == []
        async with api.AsyncClient(address, "sk-acme-0001") as client:
            await client.complete("hi", priority=-1)
            assert len(await client.models()) == 1
    standing = dispatcher.started[0].standing
    assert (standing.tenant, standing.weight, standing.priority) == ("acme", 3.0, -1)


async def test_calls_that_come_just_after_the_router_was_told_to_stop_are_answered(
    dispatcher: ScriptedDispatcher,
) -> None:
    stack = AsyncExitStack()
    address = await stack.enter_async_context(served_grpc(dispatcher))
    async with api.AsyncClient(address) as known, api.AsyncClient(address) as stranger:
        await known.complete("hi")
        stopping = asyncio.create_task(stack.aclose())
        await asyncio.sleep(0.05)
        for client in (known, stranger):
            assert (await client.complete("hi")).texts
        await stopping


async def test_an_address_in_use_names_the_flag(address: str, dispatcher: ScriptedDispatcher) -> None:
    chosen = GrpcSettings()
    servicer = Inference(dispatcher, chosen, router_metrics(), Places(1))
    with pytest.raises(ConfigError, match="--grpc"):
        async with listening(servicer, dispatcher, address, chosen, drain_s=0.1):
            raise AssertionError("two servers on one port")


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies=st.lists(st.binary(max_size=400), min_size=10, max_size=10))
def test_random_bytes_are_refused_and_harm_nobody(bodies: list[bytes]) -> None:
    async def send() -> None:
        async with (
            served_grpc(ScriptedDispatcher()) as address,
            grpc.aio.insecure_channel(address) as channel,
            api.AsyncClient(address) as client,
        ):
            for body in bodies:
                call = channel.unary_stream(f"/{SERVICE}/Generate")(body)
                try:
                    async for _ in call:
                        break
                except grpc.aio.AioRpcError as error:
                    assert error.code() in (
                        grpc.StatusCode.INVALID_ARGUMENT,
                        grpc.StatusCode.NOT_FOUND,
                        grpc.StatusCode.INTERNAL,
                    )
                assert (await client.complete("hi", max_tokens=50)).texts == ("hello world",)

    asyncio.run(send())


# ---------------------------------------------------------------- health, reflection, generated code


async def test_health_follows_readiness(address: str, dispatcher: ScriptedDispatcher) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def changes(from_status: int | None) -> int:
            """To what; its watch says so."""
            async with asyncio.timeout(20):
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
                    if answer.status != from_status:
                        return int(answer.status)
            raise AssertionError("the watch ended")

        assert await changes(not_serving) == serving
        dispatcher.is_up = False
        assert await changes(serving) == not_serving
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status == not_serving
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=""))).status == serving, (
            "the process itself is well"
        )


async def test_everything_can_be_found_and_run_through_reflection(address: str) -> None:
    def explore() -> tuple[set[str], str]:
        with grpc.insecure_channel(address) as channel:
            found = ProtoReflectionDescriptorDatabase(channel)
            services = set(found.get_services())
            pool = descriptor_pool.DescriptorPool(found)
            service = pool.FindServiceByName(SERVICE)
            generate = service.FindMethodByName("Generate")
            make: Callable[..., object] = message_factory.GetMessageClass(generate.input_type)
            answer = message_factory.GetMessageClass(generate.output_type)
            call = channel.unary_stream(
                f"/{SERVICE}/Generate", lambda message: message.SerializeToString(), answer.FromString
            )
            return services, "".join(reply.text for reply in call(make(text="hi", max_tokens=50)))

    services, text = await asyncio.to_thread(explore)
    assert SERVICE in services and "grpc.health.v1.Health" in services
    assert text == "hello world"


def test_a_client_made_from_the_proto_alone_works(tmp_path: Path) -> None:
    source = tmp_path / "src" / "elsewhere.proto"
    source.parent.mkdir()
    source.write_text((ROOT / "proto/pdcluster/rpc/inference.proto").read_text())
    # Our own copy of the messages is in this process's default pool, so the generated client runs in a process of its
    # own.
    protoc(f"-I{source.parent}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", str(source))
    script = """
import sys, grpc
import elsewhere_pb2 as pb, elsewhere_pb2_grpc as stubs
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = stubs.InferenceStub(channel)
    models = [model.id for model in stub.ListModels(pb.ListModelsRequest()).models]
    replies = list(stub.Generate(pb.GenerateRequest(text="hi", max_tokens=50)))
    print(models, "".join(reply.text for reply in replies), replies[-1].usage.completion_tokens)
"""

    async def ask() -> str:
        async with served_grpc(ScriptedDispatcher()) as address:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                script,
                address,
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                env={"PYTHONPATH": str(tmp_path)},
            )
            out, _ = await asyncio.wait_for(process.communicate(), 30)
            return out.decode().strip()

    assert asyncio.run(ask()).startswith(f"['{MODEL}'] hello world")


def test_the_committed_code_is_that_of_the_proto_files(tmp_path: Path) -> None:
    files = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    protoc(f"-I{ROOT / 'proto'}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", *files)
    for made in tmp_path.rglob("*.py"):
        assert made.read_text() == (ROOT / made.relative_to(tmp_path)).read_text(), (
            f"{made.name} is stale; run make proto"
        )
    importlib.invalidate_caches()
