"""A night of an operator, with real processes and the command itself: a slow node is found, drained under load,
restarted and taken back; a request is explained and traced; the policy is changed, shadowed and changed back; a role is
flipped; every command prints in every format; every exit code comes.

The same with one router, with two workers of one, and with two routers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import yaml
from processes import PATIENT, Up, running

pytestmark = pytest.mark.timeout(600)

PROMPTS = [f"def function_{number}(path):\n    " for number in range(6)]
NUM_OUTPUT = 48
FORMATS = ("table", "wide", "json", "yaml", "name")
READING = (
    ("get", "nodes"), ("get", "requests"), ("get", "models"), ("get", "policy"), ("describe", "node", "decode-0"),
    ("status",), ("cache",), ("events",), ("top", "--once"),
)  # fmt: skip
CLUSTER = ("--prefill", "1", "--decode", "2", "--set=router.mode=remote", "--set=node.deterministic=true", *PATIENT)
# Of what a slow node needs to be found, and a restarted one to be back.
PATIENCE_S = 90.0


class Pdctl:
    """The command as a shell runs it."""

    def __init__(self, admin: str) -> None:
        self.environment = {**os.environ, "PDCTL_ADMIN": admin, "NO_COLOR": "1"}

    def __call__(self, *words: str, code: int = 0) -> str:
        argv = [sys.executable, "-m", "pdcluster_router.pdctl", *words]
        done = subprocess.run(argv, capture_output=True, text=True, env=self.environment, timeout=120.0)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    def read(self, *words: str) -> object:
        return json.loads(self(*words, "-o", "json"))


class Clients:
    """Streams of greedy answers in the background; each must equal its undisturbed twin."""

    def __init__(self, up: Up) -> None:
        self.up, self.num_done = up, 0
        self.expected = {prompt: self.answer(prompt) for prompt in PROMPTS}
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self._running = [self._pool.submit(self._ask_on, prompt) for prompt in PROMPTS]

    def answer(self, prompt: str) -> object:
        return self.up.complete(prompt, NUM_OUTPUT)["choices"][0]["token_ids"]  # type: ignore[index]

    def _ask_on(self, prompt: str) -> None:
        while not self._is_over.is_set():
            assert self.answer(prompt) == self.expected[prompt]
            self.num_done += 1

    def finish(self) -> int:
        self._is_over.set()
        for each in self._running:
            each.result(120.0)
        self._pool.shutdown()
        return self.num_done


@contextlib.contextmanager
def clients_of(up: Up) -> Iterator[Clients]:
    clients = Clients(up)
    try:
        yield clients
    finally:
        assert clients.finish() > len(PROMPTS)


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """The process stands still for two thirds of the time, as one does whose cores somebody else uses."""
    is_over = threading.Event()

    def slow() -> None:
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.006)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.003)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def second_router(up: Up) -> Iterator[str]:
    """Another router of the same cluster; gives its Admin address."""
    (argv,) = {
        tuple(child.cmdline()) for child in up.children() if "pdcluster_router.cli" in child.cmdline()
    }  # fmt: skip
    bootstrap = argv[argv.index("--bootstrap") + 1]
    ready, announced = os.pipe()
    command = (
        sys.executable, "-m", "pdcluster_router.cli", "--bootstrap", bootstrap, "--http", "127.0.0.1:0", "--grpc", "none",
        "--admin", "127.0.0.1:0", "--ready-fd", str(announced), "--set=router.lease_s=60",
    )  # fmt: skip
    process = subprocess.Popen(command, pass_fds=(announced,), stderr=subprocess.DEVNULL)
    os.close(announced)
    try:
        with os.fdopen(ready) as lines:
            yield json.loads(lines.readline())["admin"]
    finally:
        process.terminate()
        process.wait(60.0)


@contextlib.contextmanager
def operated(kind: str) -> Iterator[tuple[Up, Pdctl]]:
    workers = ("--workers", "2") if kind == "two workers" else ()
    with running(*CLUSTER, *workers) as up, contextlib.ExitStack() as stack:
        admin = up.admin
        if kind == "two routers":
            admin = f"{admin},{stack.enter_context(second_router(up))}"
        yield up, Pdctl(admin)


def until(condition: object, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["one router", "two workers", "two routers"])
def test_a_night_of_an_operator(kind: str) -> None:
    with operated(kind) as (up, pdctl):
        assert pdctl("wait", "--nodes", "3").startswith("ready: 3 nodes")
        with clients_of(up):
            finds_drains_and_takes_back_a_slow_node(up, pdctl)
            changes_policies_and_roles(pdctl)
            follows_one_request(up, pdctl, 800)
        prints_everything_in_every_format(pdctl, FORMATS)
        fails_with_its_codes(pdctl)


def test_a_sample_of_the_night() -> None:
    """A quiet cluster of the smallest kind: each command in one format, and each exit code."""
    with running("--prefill", "1", "--decode", "1", "--set=router.mode=remote", *PATIENT) as up:
        pdctl = Pdctl(up.admin)
        pdctl("drain", "decode-0", "--timeout", "5")
        pdctl("uncordon", "decode-0")
        pdctl("wait", "--nodes", "2")
        follows_one_request(up, pdctl, 4000)
        prints_everything_in_every_format(pdctl)
        fails_with_its_codes(pdctl)


def finds_drains_and_takes_back_a_slow_node(up: Up, pdctl: Pdctl) -> None:
    pdctl("set", "policy", "--live", "round-robin")  # the usual one would soon send the slow node nothing
    with slowed(up.pid_of("decode-1")):
        until(lambda: _slow_nodes(pdctl) == {"decode-1"}, "top does not show the slow node")
        described = pdctl.read("describe", "node", "decode-1")
        assert described["cost"]["decode_samples"] > 0  # type: ignore[index,call-overload]
        told = pdctl("drain", "decode-1", "--timeout", "1")
        assert "it may be stopped" in told
    (cordoned,) = (node for node in pdctl.read("get", "nodes") if node["state"] == "cordoned")  # type: ignore[union-attr,attr-defined]
    assert cordoned["name"] == "decode-1"
    assert "decode-1 is cordoned" in pdctl("status")
    before = cordoned["incarnation"]
    up.kill("decode-1")  # `up` starts it again
    until(lambda: _boot_of(pdctl, "decode-1") not in ("", before), "the node does not come back")
    pdctl("uncordon", "decode-1")
    pdctl("wait", "--nodes", "3")


def _slow_nodes(pdctl: Pdctl) -> set[str]:
    shown = pdctl.read("top")
    return {node["name"] for node in shown["nodes"] if node["slow"]}  # type: ignore[index,call-overload]


def _boot_of(pdctl: Pdctl, name: str) -> str:
    found = [node for node in pdctl.read("get", "nodes") if node["name"] == name and node["state"] == "ready"]  # type: ignore[attr-defined]
    return found[0]["incarnation"] if found else ""


def changes_policies_and_roles(pdctl: Pdctl) -> None:
    assert "all routers would take it" in pdctl("set", "policy", "--live", "random", "--dry-run")
    pdctl("set", "policy", "--live", "round-robin", "--shadow", "seconds")
    until(lambda: re.search(r"agreed on \d+ of [1-9]", pdctl("diff", "policy")), "the shadow watches nothing")
    assert {row["name"] for row in pdctl.read("get", "policy")} == {"round-robin"}  # type: ignore[attr-defined]
    pdctl("set", "policy", "--live", "seconds", "--shadow", "none")
    assert "no shadow" in pdctl("diff", "policy", code=1)
    assert "is a mixed node now" in pdctl("set-role", "decode-1", "mixed")
    until(lambda: "mixed" in pdctl("get", "nodes"), "the role is not shown")
    pdctl("set-role", "decode-1", "decode")
    assert "already" not in pdctl("cordon", "decode-0", "decode-1")
    pdctl("uncordon", "decode-0", "decode-1")


def follows_one_request(up: Up, pdctl: Pdctl, num_output: int) -> None:
    """num_output: tokens that take seconds, as busy as the cluster is."""
    body = {"model": up.model, "prompt": PROMPTS[0], "max_tokens": num_output, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(up.client.post, "/v1/completions", json=body, headers={"x-request-id": "of-the-night"})
        until(lambda: len(pdctl("get", "requests", "-o", "name").split()) > 0, "no request is shown")
        assert asked.result(120.0).status_code == 200
    assert "decode-" in pdctl("explain", "of-the-night")
    traced = pdctl("trace", "of-the-night")
    assert "KV transfer" in traced and "decode" in traced
    with ThreadPoolExecutor(1) as pool:
        long = {**body, "max_tokens": 7500}
        asked = pool.submit(up.client.post, "/v1/completions", json=long, headers={"x-request-id": "too-long"})
        until(lambda: _request(pdctl), "it does not run")
        assert "ended" in pdctl("cancel", "too-long", "--reason", "a test")
        assert "a test" in asked.result(120.0).text
    assert "has no timeline" in pdctl("trace", "too-long", code=1)


def _request(pdctl: Pdctl) -> list[dict[str, object]]:
    """Requests that already have more tokens than those of the clients."""
    return [row for row in pdctl.read("get", "requests") if row["output_tokens"] > NUM_OUTPUT]  # type: ignore[attr-defined]


def prints_everything_in_every_format(pdctl: Pdctl, formats: tuple[str, ...] = ()) -> None:
    """formats: none: one for each command, in turns."""
    for number, words in enumerate((*READING, ("explain", "of-the-night"), ("trace", "of-the-night"))):
        for output in formats or FORMATS[number % len(FORMATS) :][:1]:
            told = pdctl(*words, "-o", output)
            if output == "json":
                json.loads(told)
            if output == "yaml":
                assert yaml.safe_load(told) == json.loads(pdctl(*words, "-o", "json")) or words[0] in ("top", "get")
    for shell in ("bash", "zsh", "fish"):
        assert "_PDCTL_COMPLETE" in pdctl("completion", shell)
    assert "node.lease_s" in pdctl("config", "view", "--section", "node")
    names = subprocess.run(
        [sys.executable, "-m", "pdcluster_router.pdctl"], capture_output=True, text=True, timeout=60.0,
        env={
            **pdctl.environment, "_PDCTL_COMPLETE": "complete_bash", "COMP_WORDS": "pdctl cordon dec", "COMP_CWORD": "2",
        },
    )  # fmt: skip
    assert "decode-0" in names.stdout.split()


def fails_with_its_codes(pdctl: Pdctl) -> None:
    assert "known:" in pdctl("describe", "node", "nobody", code=1)
    assert "no open request" in pdctl("cancel", "nobody", code=1)
    assert "kv-cost" in pdctl("set", "policy", "--live", "nonsense", code=1)
    assert "is no role" in pdctl("set-role", "decode-0", "boss", code=2)
    assert pdctl("drain", code=2)
    assert "99 nodes" in pdctl("wait", "--nodes", "99", "--timeout", "0.5", code=3)
    assert "127.0.0.1:1" in pdctl("get", "nodes", "--admin", "127.0.0.1:1", code=4)
    assert "not known" in pdctl("status", "--admin", "no.such.host.invalid:50052", code=4)


@pytest.mark.full
def test_ctrl_c_ends_the_wait_for_a_drain_and_says_what_stays() -> None:
    with running("--prefill", "0", "--decode", "0", "--mixed", "1", *PATIENT) as up:
        pdctl = Pdctl(up.admin)
        with ThreadPoolExecutor(1) as pool, slowed(up.pid_of("mixed-0")):
            asked = pool.submit(up.complete, PROMPTS[0], 7000, n=4)
            until(lambda: _request(pdctl), "it does not run")
            draining = subprocess.Popen(
                [sys.executable, "-m", "pdcluster_router.pdctl", "drain", "mixed-0"],
                env=pdctl.environment, stdout=subprocess.PIPE, text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
            )  # fmt: skip
            assert draining.stdout is not None
            assert "running 4" in draining.stdout.readline()
            draining.send_signal(signal.SIGINT)
            assert "stays cordoned" in draining.stdout.read()
            assert draining.wait(30.0) == 130
            draining.stdout.close()
            pdctl("uncordon", "mixed-0")
            for request in {str(row["name"]).rpartition("-")[0] for row in _request(pdctl)}:
                pdctl("cancel", request)
            with pytest.raises(AssertionError, match="cancelled"):
                asked.result(120.0)
    assert not psutil.pid_exists(up.process.pid)
