"""pdctl top: which nodes it calls slow."""

from pdcluster_router.operate import rates, top
from pdcluster_router.operate.reading import Row

LABELS = 'half="{half}",figure="value",node="{name}",role="x"'


def node(name: str, role: str, itl_s: float, running: int = 1) -> Row:
    return {"name": name, "role": role, "load": {"itl_s": itl_s, "running": running}}


def slow(nodes: list[Row], prefill_s: dict[str, float]) -> dict[str, list[str]]:
    lines = [
        f"pdcluster_node_predicted_seconds{{{LABELS.format(half='prefill', name=name)}}} {value}"
        for name, value in prefill_s.items()
    ]
    samples = rates.samples_of(["\n".join(["# TYPE pdcluster_node_predicted_seconds gauge", *lines, ""])])
    look = top.ClusterLook(0.0, nodes, [{"name": "router"}], samples)
    return {each["name"]: each["slow"] for each in top.figures(look, None)["nodes"] if each["slow"]}


def test_a_node_is_slow_beside_those_of_its_pool() -> None:
    nodes = [
        node("p0", "prefill", 0.0),
        node("p1", "prefill", 0.0),
        node("d0", "decode", 0.01),
        node("d1", "decode", 0.03),
    ]
    assert slow(nodes, {"p0": 0.1, "p1": 0.4}) == {"p1": ["prefill"], "d1": ["tokens"]}


def test_nodes_of_different_pools_are_not_compared() -> None:
    assert slow([node("p0", "prefill", 0.0), node("m0", "mixed", 0.0)], {"p0": 0.1, "m0": 0.9}) == {}


def test_what_decode_nodes_know_of_prompts_makes_none_of_them_slow() -> None:
    assert slow([node("d0", "decode", 0.01), node("d1", "decode", 0.01)], {"d0": 0.1, "d1": 0.9}) == {}


def test_an_idle_nodes_last_tokens_do_not_count() -> None:
    assert slow([node("d0", "decode", 0.01), node("d1", "decode", 0.9, running=0)], {}) == {}
