"""Which weights may take the place of those that serve, and what a failed load leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdcluster.checkpoint.bundled import path as bundled
from pdcluster.checkpoint.weight_image import new_image
from pdcluster.core.errors import ConfigError, ModelError
from pdcluster.core.messages import PrepareWeights
from pdcluster.core.weights import WeightsVersion, WeightTensor
from pdcluster.engine.engine import Engine
from pdcluster.engine.model.config import read_config
from pdcluster.kv.layout import KVLayout
from pdcluster.node.native.engine_start import ModelFacts, engine_config, start_engine
from pdcluster.node.native.process import RankWatch, prepare
from pdcluster.node.native.weights_source import check_place, check_replacement
from pdcluster.settings.config import KVConfig, NodeConfig, TransferConfig
from pdcluster.transfer.backends.base import Peer


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundled(), tmp_path / "other"))


def changed(model: Path, **fields: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_the_same_model_with_other_weights_may_take_over(other: Path) -> None:
    changed(other, torch_dtype="float32", _name_or_path="tuned")
    check_replacement(other, bundled(), read_config(bundled()))


@pytest.mark.parametrize("fields", [{"rms_norm_eps": 0.1}, {"rope_theta": 7.0}, {"max_position_embeddings": 64}])
def test_a_config_that_computes_something_else_may_not(other: Path, fields: dict[str, object]) -> None:
    """Nodes that take the tensors from others have their own config."""
    changed(other, **fields)
    with pytest.raises(ModelError, match="is another model"):
        check_replacement(other, bundled(), read_config(bundled()))


def test_another_tokenizer_may_not(other: Path) -> None:
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="another tokenizer"):
        check_replacement(other, bundled(), read_config(bundled()))


def test_ranks_on_fixed_ports_have_no_room_for_others_beside_them() -> None:
    check_place(NodeConfig(tp=2))
    check_place(NodeConfig(transfer=TransferConfig(port=4000)))
    with pytest.raises(ConfigError, match=r"node.transfer.port is 4000 and node.tp is 2"):
        check_place(NodeConfig(tp=2, transfer=TransferConfig(port=4000)))


def test_an_engine_that_cannot_warm_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine) -> None:
        raise ModelError("no step")

    monkeypatch.setattr(Engine, "warmup", broken)
    config = NodeConfig(kv=KVConfig(memory_bytes=1 << 20), threads=1)
    own = engine_config(config, bundled())

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for number in range(3):
        with pytest.raises(ModelError, match="no step"):
            start_engine(config, own, Peer("n", "n1"), 0)
        if not number:
            before = left()  # what is loaded once stays
    assert left() <= before


def test_a_rank_that_is_lost_before_its_engine_serves_ends_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr("pdcluster.node.native.process.end_process", ended.append)
    watch = RankWatch()
    watch("rank 1 died")
    assert watch.lost == "rank 1 died" and not ended
    watch.serves = True
    watch("rank 2 died")
    assert ended == ["rank 2 died"]


def test_a_load_that_is_refused_closes_the_image_that_it_got(other: Path) -> None:
    """The config of what serves was overwritten meanwhile."""
    served = ModelFacts(read_config(other), KVLayout(1, 1, 1, 32, "float32"), 1, 1, "digest", b"")
    changed(other, rope_theta=123.0)
    process = SimpleNamespace(config=NodeConfig(), model_dir=other, me=Peer("n", "n1"))
    message = PrepareWeights(1, WeightsVersion("pushed", 1), "node:d0")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        image = new_image([WeightTensor("x", "F32", (3,))])
        with pytest.raises(ModelError, match="is another model"):
            prepare(process, served, message, image)  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) == before
