"""Router and one node with a pooling model: its vectors are transformers', whatever the encoding and the batch.

Two kinds of models: a decoder that vLLM converts, whose last token is the embedding, and an encoder, whose first is.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from openai import APITimeoutError, OpenAI
from tiny_tokenizers import byte_level_files, word_piece_files
from vllm_cluster import VllmCluster, running_cluster

from pdcluster.api.text.model_text import TextModel

NEAR = 1e-3
VOCAB, SIZE, MAX_LEN = 448, 64, 256
ARGUMENTS = (
    "--runner=pooling",
    "--enforce-eager",
    "--dtype=float32",
    "--skip-tokenizer-init",
    f"--max-model-len={MAX_LEN}",
    "--max-num-seqs=16",
    "--block-size=32",
)
TEXTS = ["the quick brown fox", "def greet(name): return name", "naïve café", "x"]

Embed = Callable[[Sequence[int]], list[float]]


def unit(vector: Any) -> list[float]:
    return [float(number) for number in vector / vector.norm()]


def make_decoder(folder: Path) -> Embed:
    import torch

    model = checkpoints.build_model(checkpoints.Shape("qwen3", vocab_size=VOCAB, hidden_size=SIZE), 1)
    checkpoints.save(model, folder)

    @torch.no_grad()
    def embed(token_ids: Sequence[int]) -> list[float]:
        return unit(model.model(torch.tensor([list(token_ids)])).last_hidden_state[0, -1])

    return embed


def make_encoder(folder: Path) -> Embed:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
        max_position_embeddings=MAX_LEN,
    )  # fmt: skip
    model = BertModel(config).eval()
    checkpoints.save(model, folder)

    @torch.no_grad()
    def embed(token_ids: Sequence[int]) -> list[float]:
        return unit(model(torch.tensor([list(token_ids)])).last_hidden_state[0, 0])

    return embed


KINDS = {"decoder": (make_decoder, byte_level_files), "encoder": (make_encoder, word_piece_files)}


class Served:
    """A cluster, and what its vectors should be."""

    def __init__(self, cluster: VllmCluster, text: TextModel, expected: Embed) -> None:
        self.cluster, self.text, self.expected = cluster, text, expected
        self.name = cluster.name

    def post(self, given: Any, **fields: Any) -> Any:
        return self.cluster.client.post("/v1/embeddings", json={"model": self.name, "input": given, **fields})

    def embed(self, given: Any, **fields: Any) -> list[list[float]]:
        reply = self.post(given, **fields)
        assert reply.status_code == 200, reply.text
        return [each["embedding"] for each in reply.json()["data"]]

    def ids(self, text: str) -> list[int]:
        return list(self.text.encode(text, add_special_tokens=True))

    def check(self, vectors: Sequence[Sequence[float]], prompts: Sequence[Sequence[int]]) -> None:
        wanted = np.array([self.expected(prompt) for prompt in prompts])
        assert np.abs(np.array(vectors) - wanted).max() < NEAR


@pytest.fixture(scope="module", params=sorted(KINDS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    make, files = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = folder / "model"
    expected = make(model)
    for name, content in files().items():
        (model / name).write_bytes(content)
    with running_cluster(folder, model, ["mixed"], arguments=ARGUMENTS) as cluster:
        yield Served(cluster, TextModel(files()), expected)


def prompts_of(*lengths: int) -> list[list[int]]:
    return [[int(token) for token in checkpoints.prompt(length, VOCAB, 7)] for length in lengths]


def test_texts_and_tokens_have_the_vectors_that_transformers_makes(served: Served) -> None:
    served.check(served.embed(TEXTS), [served.ids(text) for text in TEXTS])
    served.check(served.embed(TEXTS[0]), [served.ids(TEXTS[0])])
    prompts = prompts_of(1, 2, 31, 32, 33, 64, 100, MAX_LEN - 1, MAX_LEN)
    served.check(served.embed(prompts), prompts)
    served.check(served.embed(prompts[3]), [prompts[3]])


def test_base64_and_float_are_the_same_numbers(served: Served) -> None:
    prompts = prompts_of(5, 50)
    plain, packed = served.embed(prompts), served.embed(prompts, encoding_format="base64")
    for one, other in zip(plain, packed, strict=True):
        assert np.allclose(one, np.frombuffer(base64.b64decode(other), "<f4"), atol=1e-6)  # type: ignore[arg-type]


def test_a_batch_and_many_at_once_change_no_vector(served: Served) -> None:
    prompts = prompts_of(*range(3, 35))
    served.check(served.embed(prompts), prompts)
    with ThreadPoolExecutor(8) as pool:
        for vectors in pool.map(lambda _: served.embed(prompts), range(8)):
            served.check(vectors, prompts)


def test_the_openai_client_works(served: Served) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{served.cluster.http}/v1", api_key="none") as client:
        reply = client.embeddings.create(model=served.name, input=TEXTS)
        served.check([each.embedding for each in reply.data], [served.ids(text) for text in TEXTS])
        assert reply.usage.prompt_tokens == sum(len(served.ids(text)) for text in TEXTS)


def test_dimensions_are_the_model_s_own_or_refused(served: Served) -> None:
    served.check(served.embed("x", dimensions=SIZE), [served.ids("x")])
    for wrong in (SIZE // 2, SIZE + 1):
        reply = served.post("x", dimensions=wrong)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "dimensions", reply.text
        assert f"dimensions is {wrong}; leave it out, the model makes {SIZE}" in reply.text


def test_what_a_pooling_model_cannot_do_is_refused_by_name(served: Served) -> None:
    long = served.post(prompts_of(MAX_LEN + 1))
    assert long.status_code == 400 and f"{MAX_LEN + 1} tokens" in long.text
    reply = served.cluster.client.post("/v1/completions", json={"model": served.name, "prompt": "x"})
    assert reply.status_code == 400 and "embeds and generates nothing" in reply.text


def test_a_client_that_leaves_disturbs_nobody(served: Served) -> None:
    prompts = prompts_of(*[MAX_LEN] * 64)
    url = f"http://127.0.0.1:{served.cluster.http}/v1"
    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=0.05)
    with client, pytest.raises(APITimeoutError):
        client.embeddings.create(model=served.name, input=prompts)
    served.check(served.embed(TEXTS), [served.ids(text) for text in TEXTS])
