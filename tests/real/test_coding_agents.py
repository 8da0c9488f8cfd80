"""Coding agents as npm has them, unchanged, against a router over nodes that say recorded outputs.

Each is asked once. The nodes call its shell twice and then answer, so three prompts come, each with the one before in
front. `make test-clients` installs the agents.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_cluster import Outputs, RouterProcess, fake_cluster
from npm_tokenizers import fetched

from bench.fakes.fake_node import Speed
from pdcluster.api.text.model_text import TextModel
from pdcluster.core.messages import Work, unpack_tokens

BIN = Path(__file__).parents[1] / "clients" / "node" / "node_modules" / ".bin"
ASKED = "Run echo hello twice and tell me what it printed."
CALLS = {
    "codex": '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo hello"}}\n</tool_call>',
    "claude": '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo hello", "description": "Say it"}}\n</tool_call>',
}
ANSWER = "It printed hello, twice."
CODEX = """model = "fake"
model_provider = "own"
model_context_window = 200000
[model_providers.own]
name = "own"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OWN_KEY"
"""
LIMIT_S = 120
LEAST_HITS = 0.95


class Recorded:
    """What the nodes say: a call until its output came twice."""

    def __init__(self, text: TextModel, call: str) -> None:
        self._text, self._call = text, call
        # Of each prompt that came, its tokens.
        self.prompts: dict[str, list[int]] = {}

    def __call__(self, work: Work) -> Sequence[int]:
        prompt = unpack_tokens(work.token_ids)[: work.num_prompt]
        self.prompts[work.request] = prompt
        shown = self._text.decode(prompt, skip_special_tokens=False)
        said = ANSWER if shown.count("<tool_response>") >= 2 else self._call
        return [*self._text.encode(said, add_special_tokens=False), self._text.eos_token_ids[0]]


def codex(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX.format(url=url))
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED], {"OWN_KEY": "none"}


def claude(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL")
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
        **dict.fromkeys(names, "fake"),
    }
    return ["-p", ASKED, "--dangerously-skip-permissions"], variables


@pytest.mark.parametrize("agent", [codex, claude], ids=["codex", "claude"])
def test_an_agent_works_at_full_prefix_hits(
    agent: Callable[[str, Path], tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    program = BIN / agent.__name__
    if not program.exists():
        pytest.skip(f"{program} is missing; make test-clients installs it")
    model = fetched("qwen3")
    text = TextModel.from_dir(model)
    recorded = Recorded(text, CALLS[agent.__name__])
    outputs = Outputs(model, 200_000, text.vocab_size, recorded)
    with fake_cluster(["prefill", "decode"], Speed(), num_pages=1 << 15, outputs=outputs) as (bootstrap, _):
        router = RouterProcess(bootstrap)
        try:
            arguments, variables = agent(router.url, tmp_path)
            home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
            done = subprocess.run(
                [str(program), *arguments], cwd=tmp_path, env=home | variables, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            metrics = router.metrics()
        finally:
            assert router.stop() == 0
            shutil.rmtree(tmp_path, ignore_errors=True)
    assert done.returncode == 0 and ANSWER in done.stdout, done.stdout + done.stderr
    sizes = [len(prompt) for prompt in recorded.prompts.values()]
    assert len(sizes) == 3, sizes
    hits = metrics["pdcluster_cached_prompt_tokens_total"] / sum(sizes[1:])
    print(f"{agent.__name__}: prompts of {sizes} tokens, hits of the later ones {hits:.3f}")
    assert hits >= LEAST_HITS, (hits, sizes)
