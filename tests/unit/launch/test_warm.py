"""What `make setup` compiles is what nodes look for, where they look."""

import sys

import pytest
from checkpoints import KERNEL_CACHE

from pdcluster.launch import warm as module
from pdcluster.launch.warm import main, warm
from pdcluster.node.native.engine_start import engine_config
from pdcluster.processes.kernel_cache import place_of
from pdcluster.settings.config import NodeConfig, cache_directory
from pdcluster_router.policy.predicted import compiled


def test_after_it_nothing_is_left_to_compile_where_nodes_look(tmp_path):
    assert warm(KERNEL_CACHE).startswith(f"CPU kernels are compiled in {KERNEL_CACHE} (")
    assert {"bfloat16.filled", "pairs.filled", "float32.filled"} <= {
        path.name for path in place_of(KERNEL_CACHE).iterdir()
    }
    assert compiled.is_kept(KERNEL_CACHE)
    assert engine_config(NodeConfig(), tmp_path).cache_dir == cache_directory() == KERNEL_CACHE


def test_a_machine_without_numba_goes_without(monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert warm(tmp_path).startswith("skipped: ")
    assert "numba cannot be imported" in caplog.text and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("now", 2)])
def test_nothing_is_compiled_for_who_asks_what_it_does_or_asks_it_wrongly(argument, code, monkeypatch, capsys):
    monkeypatch.setattr(module, "warm", lambda directory: pytest.fail("it compiles"))
    with pytest.raises(SystemExit) as ended:
        main([argument])
    assert ended.value.code == code and "usage: python -m pdcluster.launch.warm" in "".join(capsys.readouterr())
