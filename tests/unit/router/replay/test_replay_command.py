"""`pdctl replay` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from pdcluster.core.errors import ConfigError
from pdcluster_router.pdctl import app
from pdcluster_router.replay.command import layout_of, split_policies
from pdcluster_router.replay.options import NodeOptions, Routing

RUN = CliRunner()
FIELDS = {
    "policy",
    "ttft_mean_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "goodput",
    "hit",
    "hit_oracle",
    "imbalance",
}


def _trace(path: Path) -> Path:
    rows = [
        {"timestamp": 1000 * n, "input_length": 1100, "output_length": 20, "hash_ids": [0, n % 3, n]} for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_has_one_row_per_policy_with_the_promised_fields(tmp_path: Path) -> None:
    file = _trace(tmp_path / "t.jsonl")
    done = RUN.invoke(
        app,
        [
            "replay",
            str(file),
            "--policy",
            "product,product",
            "--prefill",
            "2",
            "--decode",
            "1",
            "--speedup",
            "2",
            "-o",
            "json",
        ],
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["policy"] for row in rows] == ["product", "product"] and all(row.keys() >= FIELDS for row in rows)
    assert rows[0] == rows[1] and 0 < rows[0]["hit"] <= rows[0]["hit_oracle"]


def test_a_table_has_a_line_per_policy(tmp_path: Path) -> None:
    done = RUN.invoke(
        app, ["replay", str(_trace(tmp_path / "t.jsonl")), "--mixed", "2", "--cache-tokens", "50000", "--seed", "1"]
    )
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and lines[0].split()[0] == "policy" and len(lines) == 2


def test_generated_traces_need_no_file() -> None:
    done = RUN.invoke(app, ["replay", "generate:chat:50", "--policy", "product", "--mixed", "1", "-o", "json"])
    assert done.exit_code == 0 and json.loads(done.stdout)[0]["num_requests"] == 50


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay", "no/such/file"], "cannot read the trace no/such/file"),
        (["replay", "generate:talk"], "no workload is called 'talk'"),
        (["replay", "generate:chat:many"], "write generate:KIND:REQUESTS"),
        (["replay", "generate:chat:5", "--policy", "best"], "no routing policy is called 'best'"),
        (["replay", "generate:chat:5", "--prefill", "0"], "give at least one node"),
        (["replay", "generate:chat:5", "--mixed", "-1"], "--mixed is -1"),
        (["replay", "generate:chat:5", "--speedup", "0"], "--speedup is 0, but must be from 0.001 to 1e+06"),
        (["replay", "generate:chat:5", "--speedup", "nan"], "--speedup is nan"),
        (["replay", "generate:chat:5", "--speedup", "inf"], "--speedup is inf"),
        (["replay", "generate:chat:5", "--speedup", "1e-300"], "--speedup is 1e-300"),
        (["replay", "generate:chat:5", "--feed-delay-ms", "nan"], "--feed-delay-ms is nan"),
        (["replay", "generate:chat:5", "--prefill", "100000000"], "--prefill is 1e+08"),
        (["replay", "generate:chat:99999999999"], "must be from 1 to 5e+06"),
        (["replay", "gen:chat:5"], "generated requests are called generate:chat"),
        (["replay", "chat"], "generated requests are called generate:chat"),
        (["replay", "generate:nope"], "no workload is called 'nope'"),
        (["replay", "generate:chat:5", "--cache-tokens", "10"], "holds no block of 512"),
        (["replay", "generate:chat:5", "--feed-loss", "1"], "--feed-loss is 1, but must be from 0 to 0.999"),
        (["replay", "generate:chat:5", "-o", "yml"], "'yml' is not one of"),
        (["replay", "generate:chat:5", "--polcy", "x"], "--polcy"),
        (["rplay"], "rplay"),
    ],
)
def test_what_cannot_be_done_is_said_and_exits_2(arguments: list[str], says: str) -> None:
    done = RUN.invoke(app, arguments)
    assert done.exit_code == 2 and says in " ".join(done.output.replace("│", " ").split())


def test_parameters_stay_with_their_policy() -> None:
    with pytest.raises(ConfigError, match="does not take a, b; it takes no parameters"):
        split_policies("product:a=1,b=2")
    assert split_policies("") != [] and split_policies("product, product") == ["product", "product"]


def test_the_policies_that_the_help_shows_can_be_asked_for() -> None:
    shown = get_type_hints(Routing, include_extras=True)["policy"].__metadata__[0].help.rpartition(": ")[2]
    assert split_policies(shown) == ["product", "kv-cost:weight=2,decay=1"]


def test_roles_default_to_a_disaggregated_cluster_only_when_none_is_given() -> None:
    sizes = [
        (found.prefill, found.decode, found.mixed)
        for found in (
            layout_of(asked, seed=0)
            for asked in (NodeOptions(), NodeOptions(mixed=3), NodeOptions(prefill=1, decode=2))
        )
    ]
    assert sizes == [(8, 4, 0), (0, 0, 3), (1, 2, 0)]


def test_help_loads_no_simulator_and_a_replay_no_torch() -> None:
    code = """
import sys
from typer.testing import CliRunner
from pdcluster_router.pdctl import app
assert CliRunner().invoke(app, ["replay", "--help"]).exit_code == 0
assert {m for m in sys.modules if m.startswith("pdcluster_router.")} == {"pdcluster_router." + m for m in ("pdctl", "operate", "operate.batch", "operate.batch.flags", "operate.printing", "replay", "replay.options")}
assert "numpy" not in sys.modules, "imported for --help"
assert CliRunner().invoke(app, ["replay", "generate:rag:5", "--mixed", "1"]).exit_code == 0
sys.exit("torch was loaded" if {"torch", "transformers", "numba"} & {m.split(".")[0] for m in sys.modules} else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
