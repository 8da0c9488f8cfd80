"""lm-eval's local-completions: loglikelihoods of continuations, with the server's tokenizer or one of its own. It
brings half a gigabyte, so that `make test-clients` leaves it out. To run this, install it once: .venv-clients/bin/pip
install 'lm-eval[api]' transformers"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import httpx
import pytest
from conftest import REPOSITORY, Served

lm_eval = pytest.importorskip("lm_eval")

PAIRS = [("import os\nimport ", "sys"), ("def read_lines(path):\n    with ", "open(path) as file:"), ("", "import os")]


def scores_of(served: Served, **options: Any) -> list[tuple[float, bool]]:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    model = get_model("local-completions")(
        model=served.model, base_url=f"{served.base_url}/completions", max_length=512, max_retries=1, **options
    )
    requests = [Instance("loglikelihood", {}, pair, index, ("t", 0, 1)) for index, pair in enumerate(PAIRS)]
    return model.loglikelihood(requests)


def bundled() -> str:
    """The bundled model's directory."""
    code = "from pdcluster import bundled_model; print(bundled_model.path())"
    return subprocess.check_output([REPOSITORY / ".venv/bin/python", "-c", code], text=True, cwd=REPOSITORY).strip()


def test_the_servers_tokenizer_and_a_local_one_give_the_same_scores(served: Served) -> None:
    remote, is_greedy = zip(*scores_of(served, tokenizer_backend="remote", tokenized_requests=True), strict=True)
    assert len(remote) == len(PAIRS) and all(score < 0 for score in remote) and is_greedy[0]
    pytest.importorskip("transformers")
    local = {"tokenizer_backend": "huggingface", "tokenizer": bundled()}
    for options in ({}, local, {**local, "batch_size": 3}, {**local, "tokenized_requests": False}):
        assert [score for score, _ in scores_of(served, **options)] == pytest.approx(list(remote), abs=0.05), options


def test_text_is_generated(served: Served) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    model = get_model("local-completions")(
        model=served.model, base_url=f"{served.base_url}/completions", tokenizer_backend="remote"
    )
    asked = Instance("generate_until", {}, ("import os\n", {"until": ["\n\n"], "max_gen_toks": 10}), 0, ("t", 0, 1))
    assert model.generate_until([asked])[0]
    info = httpx.get(f"{served.url}/tokenizer_info").json()
    assert json.dumps(info["eos_token"])
