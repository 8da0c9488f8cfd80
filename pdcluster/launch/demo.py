"""`pdcluster demo`: starts a cluster like `up`, sends it real requests over HTTP, prints each stream and its timeline,
and stops it.

A client like any other: it uses the OpenAI API over the standard library's HTTP.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

from pdcluster.checkpoint import bundled
from pdcluster.core.errors import ConfigError, PdclusterError
from pdcluster.launch.up import ClusterOutput, LocalCluster, Serving, make_output, on_signals, stop_all, unless
from pdcluster.processes.http_client import http_connection
from pdcluster.settings.config import LoadedSection, RouterConfig, UpConfig, load
from pdcluster.telemetry.timeline import render

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG_PROMPT_CHARS = 2800
SHOWN_PROMPT_LINES = 3
REQUEST_TIMEOUT_S = 60.0
# Defaults of the demo: any free port, quiet logs, every request through two nodes.
DEFAULTS: dict[str, object] = {
    "up.http": "127.0.0.1:0",
    "up.grpc": "none",
    "up.log.level": "error",
    "router.mode": "remote",
}


class DemoFailed(PdclusterError):
    """A request of the demo was not answered well."""

    code = "demo_failed"


@dataclass(frozen=True, slots=True)
class Example:
    """prompt: its last lines are shown before the answer."""

    title: str
    path: str
    prompt: str
    body: Mapping[str, object]


QUESTIONS = ("What is the capital of France?", "Write a short poem about the sea.")


def chats() -> list[Example]:
    """For a model that was made to chat. The long prompt is a page of Python's manual."""
    long = f"Summarize this text in two sentences.\n\n{topics['import'][:LONG_PROMPT_CHARS]}"
    again = "the same long prompt again: its KV is cached on both nodes"
    titled = [
        ("a question", QUESTIONS[0]),
        ("another", QUESTIONS[1]),
        ("a long prompt: its KV moves while prefill still runs", long),
        (again, long),
    ]
    return [
        Example(
            title,
            CHAT,
            text.partition("\n")[0],
            {"messages": [{"role": "user", "content": text}], "max_tokens": 96, "temperature": 0},
        )
        for title, text in titled
    ]


def completions() -> list[Example]:
    """The long prompt is a piece of the standard library, since that is what the bundled model has read."""
    short = 'def read_lines(path):\n    """Return the lines of'
    question = "What is pdcluster?"
    source = inspect.getsource(textwrap)
    long = source[: source.index("\n\n", LONG_PROMPT_CHARS) + 1]
    chat = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
    return [
        Example("a completion", COMPLETIONS, short, _completion(short)),
        Example("a chat", CHAT, question, chat),
        Example("a long prompt: its KV moves while prefill still runs", COMPLETIONS, long, _completion(long)),
        Example("the same long prompt again: its KV is cached on both nodes", COMPLETIONS, long, _completion(long)),
    ]


def _completion(prompt: str) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 64, "temperature": 0.5, "seed": 11}


def run(loaded: LoadedSection[UpConfig]) -> int:
    return asyncio.run(_demo(_with_defaults(loaded)))


def _with_defaults(loaded: LoadedSection[UpConfig]) -> LoadedSection[UpConfig]:
    origins = {**loaded.origins, **load(RouterConfig, loaded.flags, loaded.file).origins}
    wanted = {path: value for path, value in DEFAULTS.items() if origins[path] == "default"}
    if not (loaded.config.prefill and loaded.config.decode):
        wanted.pop("router.mode", None)
    return load(UpConfig, {**wanted, **loaded.flags}, loaded.file)


def check_open(loaded: LoadedSection[UpConfig]) -> None:
    """The demo is a client without an API key."""
    router = load(RouterConfig, loaded.flags, loaded.file)
    if router.config.tenants is not None:
        way_out = "leave it out, or use pdcluster up"
        raise ConfigError(f"router.tenants is {router.config.tenants}, and the demo has no API key; {way_out}")


async def _demo(loaded: LoadedSection[UpConfig]) -> int:
    check_open(loaded)
    output, log_format = make_output(loaded)
    stop = on_signals()
    cluster = LocalCluster(loaded, output, log_format=log_format)
    done = None
    try:
        serving = await unless(stop.first, cluster.start())
        if serving is not None:
            output.say(serving.line())
            done = await unless(stop.first, _converse(serving, output))
    except PdclusterError as error:
        output.say(f"error: {error}")
    finally:
        clean = await stop_all(cluster, stop)
    output.say("stopped; `make up` keeps a cluster running" if done else "stopped")
    return 0 if done and clean else 1


async def _converse(serving: Serving, output: ClusterOutput) -> bool:
    """Send the examples one after the other; True when all were answered."""
    is_bundled = serving.model == bundled.path().name
    examples = chats() if not is_bundled and await asyncio.to_thread(_takes_chats, serving) else completions()
    for number, example in enumerate(examples, start=1):
        output.say(f"\n{number}. {example.title} (POST {example.path})\n")
        for line in example.prompt.splitlines()[-SHOWN_PROMPT_LINES:]:
            output.say(f"  > {line}")
        usage = await asyncio.to_thread(_show, serving, example, output)
        output.say("\n")
        for line in render(usage):
            output.say(line)
    output.say("")
    return True


def _takes_chats(serving: Serving) -> bool:
    """Whether the model has a chat template."""
    body = {"model": serving.model, "messages": [{"role": "user", "content": "hello"}]}
    connection = http_connection(serving.host, serving.port, REQUEST_TIMEOUT_S, serving.trust)
    try:
        connection.request("POST", "/tokenize", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException) as error:
        raise DemoFailed(f"/tokenize lost its connection: {error}") from error
    finally:
        connection.close()


def _show(serving: Serving, example: Example, output: ClusterOutput) -> dict[str, Any]:
    """Print one answer as it streams in; returns its usage."""
    usage: dict[str, Any] = {}
    output.write("  ")
    for event in _events(serving, example):
        if "error" in event:
            raise DemoFailed(f"{example.path} broke off: {event['error'].get('message')}")
        for choice in event.get("choices", []):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            output.write(text.replace("\n", "\n  "))
        usage = event.get("usage") or usage
    if not usage.get("completion_tokens"):
        raise DemoFailed(f"{example.path} ended without usage, so it was not answered in full")
    return usage


def _events(serving: Serving, example: Example) -> Iterator[dict[str, Any]]:
    """The server-sent events of one streaming request, up to its [DONE]."""
    body = {**example.body, "model": serving.model, "stream": True, "stream_options": {"include_usage": True}}
    connection = http_connection(serving.host, serving.port, REQUEST_TIMEOUT_S, serving.trust)
    try:
        connection.request("POST", example.path, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise DemoFailed(
                f"{example.path} was answered with {reply.status}: {reply.read(2000).decode(errors='replace')}"
            )
        for line in reply:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data.startswith(b"{"):
                yield json.loads(data)
    except (OSError, http.client.HTTPException) as error:
        raise DemoFailed(f"{example.path} lost its connection: {error}") from error
    finally:
        connection.close()
    raise DemoFailed(f"{example.path} ended without [DONE]")
