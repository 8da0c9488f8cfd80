"""Kinds of settings: what each accepts, and that it refuses everything else with a sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.settings.kinds import (
    adapter_paths,
    address,
    addresses,
    boolean,
    choice,
    cores,
    devices,
    duration,
    integer,
    label,
    model_path,
    nearest,
    origins,
    own_host,
    path,
    size,
    text,
)


@pytest.mark.parametrize(
    ("raw", "value"), [("512KiB", 524288), ("2GiB", 2**31), ("1.5MB", 1500000), ("7", 7), (7, 7), ("64 M", 64 * 2**20)]
)
def test_sizes_are_read_with_their_units(raw: object, value: int) -> None:
    assert size()(raw) == value


@pytest.mark.parametrize("raw", ["3k", "1 PB", True, None, -1, "-1", 1.5, ""])
def test_sizes_that_are_none_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        size()(raw)


def test_a_size_has_an_upper_bound_where_one_is_named() -> None:
    assert size(4096, 2**30)("1GiB") == 2**30
    with pytest.raises(ValueError, match="at most 1073741824 bytes"):
        size(4096, 2**30)("2GiB")


@pytest.mark.parametrize(
    ("raw", "value"), [("500ms", 0.5), ("2.5s", 2.5), ("10m", 600.0), ("1h", 3600.0), (3, 3.0), ("4", 4.0)]
)
def test_durations_are_read_with_their_units(raw: object, value: float) -> None:
    assert duration()(raw) == pytest.approx(value)


@pytest.mark.parametrize("raw", [float("nan"), float("inf"), True, None, "1d", "", "1e3"])
def test_durations_that_are_none_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        duration()(raw)


def test_addresses_come_as_text_or_as_a_list() -> None:
    assert addresses("a:1, b:2") == addresses(["a:1", "b:2"]) == ("a:1", "b:2")
    for raw in ("a:1,,b:2", [], "a", ["a:1", 2]):
        with pytest.raises(ValueError, match="HOST:PORT"):
            addresses(raw)


@pytest.mark.parametrize("raw", ["127.0.0.1:8000", "[::1]:80", "node.local:0"])
def test_an_address_stays_as_it_was_written(raw: str) -> None:
    assert address(raw) == raw


def test_an_own_host_is_one_that_others_reach() -> None:
    assert own_host("[fd00::1]") == own_host("fd00::1") == "fd00::1" and own_host("node-3") == "node-3"
    for raw in ("0.0.0.0", "::", "[::]"):
        with pytest.raises(ValueError, match="not all of its addresses"):
            own_host(raw)
    for raw in ("", "::1:80:x", "a b", 5):
        with pytest.raises(ValueError, match="must be"):
            own_host(raw)


@pytest.mark.parametrize("raw", ["::1:80", "a:b", ":80", "http://a:80", "a:80/v1", "a b:80", "", 80])
def test_what_is_no_address_is_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        address(raw)


def test_origins_are_schemes_with_hosts_or_all() -> None:
    assert origins("https://A.example, http://localhost:3000") == origins(
        ["https://a.example", "http://localhost:3000"]
    )
    assert origins("*") == ("*",) and origins("app://x") == ("app://x",)
    for raw in ("", "a.example", "https://a.example/", "https://a/b", [], 5, None):
        with pytest.raises(ValueError, match="must be origins"):
            origins(raw)


def test_devices_are_names_with_a_port_or_without_each_once() -> None:
    assert devices("mlx5_0, mlx5_1:2") == devices(["mlx5_0", "mlx5_1:2"]) == ("mlx5_0", "mlx5_1:2")
    for raw in ("", "mlx5_0,", "mlx5_0,mlx5_0", "a b", "mlx5_0:x", "../x", [], 3, None):
        with pytest.raises(ValueError, match="RDMA devices"):
            devices(raw)


def test_cores_are_single_numbers_and_ranges() -> None:
    assert cores("4-6,0") == (0, 4, 5, 6)
    assert cores([1, 1]) == (1,)
    for raw in ("", "2-", "5-4", [], -1):
        with pytest.raises(ValueError, match="CPU cores"):
            cores(raw)


def test_booleans_are_words_or_toml_values() -> None:
    assert [boolean(raw) for raw in (True, "true", "YES", "1")] == [True] * 4
    assert [boolean(raw) for raw in (False, "false", "no", "0")] == [False] * 4
    for raw in (1, 0, None, "on!", []):
        with pytest.raises(ValueError, match="true or false"):
            boolean(raw)


def test_adapters_are_names_with_directories() -> None:
    assert adapter_paths("sql=/a/sql, sums=/a/b=c") == ("sql=/a/sql", "sums=/a/b=c")
    assert adapter_paths(["sql=/a/sql"]) == ("sql=/a/sql",)


@pytest.mark.parametrize("raw", ["", "sql", "sql=", "=/a", "sql=/a,sql=/b", "a\n=/a", 7, {"sql": "/a"}], ids=str)
def test_adapters_without_a_name_or_a_directory_or_named_twice_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="NAME=DIRECTORY"):
        adapter_paths(raw)


def test_a_path_may_start_at_home() -> None:
    assert path("~/x") == Path.home() / "x"


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.text())))
def test_no_raw_value_makes_a_kind_fail_otherwise_than_by_value_error(raw: object) -> None:
    for kind in (address, addresses, boolean, cores, devices, path, duration(), integer(0), size()):
        try:
            kind(raw)
        except ValueError as error:
            assert "must be" in str(error)


def test_the_nearest_word_is_offered_only_when_there_is_one() -> None:
    assert nearest("prefil", ("prefill", "decode")) == "; did you mean prefill?"
    assert nearest("zzz", ("prefill", "decode")) == ""
    with pytest.raises(ValueError, match="did you mean decode"):
        choice("prefill", "decode")("decod")


def test_text_is_not_empty() -> None:
    assert text("a") == "a"
    for raw in ("", None, 3):
        with pytest.raises(ValueError, match="not empty"):
            text(raw)


@pytest.mark.parametrize("raw", ["a\n", "\x1b[2J", "a\x00b", "", None, 3, "\ud800"])
def test_what_is_shown_in_heads_and_logs_is_printable(raw: object) -> None:
    assert label("decode-0 of größe") == "decode-0 of größe"
    with pytest.raises(ValueError, match="must be"):
        label(raw)


def test_what_begins_as_a_path_is_never_a_name_of_a_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_path("./org/name") == tmp_path / "org" / "name"
    assert model_path("../name").is_absolute() and model_path("~/org").is_absolute()
    assert model_path("org/name@main") == Path("org/name@main")
