"""Which version of the weights a request gets: complete versions first, canaries by their share, then the newest."""

from __future__ import annotations

import pytest

from pdcluster.core.messages import Role
from pdcluster.core.weights import WeightsVersion
from pdcluster_router.cluster.versions import Version, VersionPlan, plan_of
from pdcluster_router.core.generation import ModelInfo


def version(epoch: int, share: float = 100.0) -> Version:
    weights = WeightsVersion(f"v{epoch}", epoch, f"w{epoch}")
    return Version(ModelInfo("m", 0, 64, 100, (), f"d{epoch}", weights=weights), share)


def planned(*versions: Version, is_local: bool = False, **roles: tuple[Role, ...]) -> VersionPlan:
    return plan_of(versions, roles, is_local=is_local)


def label(plan: VersionPlan, request: str = "r") -> str:
    return plan.choose(request).weights.label


PAIR: tuple[Role, ...] = ("prefill", "decode")


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ({"d2": PAIR, "d1": PAIR}, "v2"),
        ({"d2": ("prefill",), "d1": PAIR}, "v1"),
        ({"d2": ("decode",), "d1": PAIR}, "v1"),
        ({"d2": ("mixed",), "d1": PAIR}, "v2"),
        ({"d2": ("decode", "mixed"), "d1": PAIR}, "v2"),
        ({"d2": ("prefill",), "d1": ("decode",)}, "v2"),
        ({"d1": ("decode",)}, "v1"),
        ({}, "v2"),
    ],
    ids=["both whole", "no decode node yet", "no prefill node yet", "one mixed node", "a mixed node prefills",
         "none whole", "one takes work", "none takes work"],
)  # fmt: skip
def test_a_complete_version_wins_then_one_with_a_node_then_the_newest(
    roles: dict[str, tuple[Role, ...]], expected: str
) -> None:
    assert label(planned(version(2), version(1), **roles)) == expected


def test_in_mode_local_one_node_is_enough() -> None:
    assert label(planned(version(2), version(1), is_local=True, d2=("decode",), d1=PAIR)) == "v2"


@pytest.mark.parametrize("share", [0.0, 1.0, 25.0, 99.0])
def test_a_canary_gets_its_share_of_requests_and_each_request_always_the_same(share: float) -> None:
    plan = planned(version(2, share), version(1), d2=PAIR, d1=PAIR)
    requests = [f"{number:016x}" for number in range(20_000)]
    labels = [label(plan, request) for request in requests]
    assert abs(100 * labels.count("v2") / len(labels) - share) < 1.5
    assert (share > 0) or "v2" not in labels
    again = planned(version(2, share), version(1), d2=PAIR, d1=PAIR)
    assert [label(again, request) for request in requests] == labels


def test_several_canaries_get_their_shares_beside_each_other() -> None:
    plan = planned(version(3, 10.0), version(2, 20.0), version(1), d3=PAIR, d2=PAIR, d1=PAIR)
    labels = [label(plan, f"{number:016x}") for number in range(20_000)]
    for name, share in (("v3", 10.0), ("v2", 20.0), ("v1", 70.0)):
        assert abs(100 * labels.count(name) / len(labels) - share) < 1.5


def test_a_canary_without_its_nodes_gets_nothing() -> None:
    plan = planned(version(2, 50.0), version(1), d2=("prefill",), d1=PAIR)
    assert {label(plan, f"{number}") for number in range(100)} == {"v1"}


def test_a_canary_takes_no_more_than_its_share_while_the_others_wait() -> None:
    plan = planned(version(2, 50.0), version(1), d2=PAIR)
    assert {label(plan, f"{number}") for number in range(100)} == {"v1", "v2"}


def test_where_no_version_has_all_requests_the_newest_has() -> None:
    plan = planned(version(2, 50.0), version(1, 5.0), d2=PAIR, d1=PAIR)
    assert {label(plan, f"{number}") for number in range(100)} == {"v2"}


def test_a_request_goes_on_with_another_version_only_where_its_own_has_no_nodes() -> None:
    def successor(digest: str, **roles: tuple[Role, ...]) -> str | None:
        found = planned(version(2), version(1), **roles).successor(digest)
        return None if found is None else found.digest

    assert successor("d1", d2=PAIR, d1=PAIR) is None
    assert successor("d1", d2=PAIR) == "d2"
    assert successor("d0", d2=PAIR, d1=PAIR) == "d2"
    assert successor("d1", d2=PAIR, d1=("decode",)) == "d2"
    assert successor("d1", d2=("decode",), d1=("decode",)) == "d2"
    assert successor("d1") is None and successor("d2") is None
    assert successor("d2", d1=PAIR) == "d1", "back to the weights of before"
