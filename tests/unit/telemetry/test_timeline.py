"""A request's timeline as text."""

from typing import Any

from pdcluster.telemetry.timeline import BAR, FAINT, WIDTH, render

TIMELINE = {
    "queue_s": 0.001,
    "prefill_s": 0.200,
    "transfer_s": 0.150,
    "exposed_s": 0.010,
    "ttft_s": 0.205,
    "ttst_s": 0.220,
    "decode_s": 0.400,
    "decode_tokens": 47,
    "transfer_bytes": 12_345_678,
}


def usage(timeline: dict[str, Any] | None = TIMELINE, **route: object) -> dict[str, Any]:
    where = {
        "mode": "remote",
        "prefill": "prefill-0",
        "decode": "decode-0",
        "transfer": "shm",
        "attempts": 1,
        "timeline": timeline,
    } | route
    return {
        "prompt_tokens": 900,
        "completion_tokens": 48,
        "prompt_tokens_details": {"cached_tokens": 64},
        "pdcluster": where,
    }


def row(lines: list[str], name: str) -> str:
    (found,) = [line for line in lines if line.strip().startswith(name)]
    return found


def test_the_first_line_says_how_much_and_where() -> None:
    assert render(usage())[0] == "  900 prompt tokens (64 cached), 48 new, prefill-0 → decode-0 over shm"
    assert "(64 cached, 32 of them fetched from another node)" in render(usage(TIMELINE | {"pulled_tokens": 32}))[0]
    assert "3 attempts" in render(usage(attempts=3))[0]


def test_weights_are_named_where_they_are_not_those_that_nodes_start_with() -> None:
    def shown(*labels: str) -> str:
        return render(usage(weights=[{"from": 0, "to": 9, "label": label} for label in labels]))[0]

    assert "weights" not in shown() + shown("base")
    assert shown("v1").endswith(", weights v1") and shown("base", "v1").endswith(", weights base, then v1")


def test_what_went_before_the_attempt_that_is_shown_has_its_own_line() -> None:
    lines = render(usage(TIMELINE | {"placed_s": 1.0, "ttft_s": 0.3, "ttst_s": 1.3}, attempts=2))
    assert "1000.0 ms" in row(lines, "held, tried")
    assert row(lines, "prefill").index(BAR) > row(lines, "first token").index(BAR), (
        "the prompt was computed again after the first token"
    )
    assert not [line for line in render(usage(TIMELINE | {"placed_s": 0.0002})) if line.strip().startswith("held")]


def test_every_stage_has_its_time() -> None:
    lines = render(usage())
    times = {
        "queue": "1.0 ms",
        "prefill": "200.0 ms",
        "first token": "205.0 ms",
        "second token": "220.0 ms",
        "decode": "400.0 ms",
    }
    for name, took in times.items():
        assert took in row(lines, name)
    assert "118 tokens/s" in row(lines, "decode")


def test_the_transfer_is_split_into_what_was_hidden_and_what_was_waited_for() -> None:
    line = row(render(usage()), "KV transfer")
    assert "140.0 ms hidden behind prefill, 10.0 ms exposed, 12.35 MB" in line
    assert BAR in line
    assert FAINT in line


def test_a_transfer_that_began_after_prefill_is_exposed_whole() -> None:
    line = row(render(usage({**TIMELINE, "transfer_s": 0.010, "exposed_s": 0.050})), "KV transfer")
    assert "0.0 ms hidden behind prefill, 10.0 ms exposed" in line


def test_a_request_on_one_node_has_no_transfer() -> None:
    lines = render(usage(mode="local", prefill=None, transfer=""))
    assert lines[0].endswith("decode-0 alone")
    assert not any("KV transfer" in line for line in lines)


def test_moments_that_never_came_have_no_line() -> None:
    lines = render(usage({**TIMELINE, "ttst_s": None, "decode_s": 0.0, "decode_tokens": 0}))
    assert not any("second token" in line or "decode  " in line for line in lines[1:])


def test_a_request_without_a_timeline_says_so() -> None:
    assert "no timeline" in render(usage(None))[1]


def test_all_bars_lie_within_the_width() -> None:
    for timeline in (TIMELINE, dict.fromkeys(TIMELINE, 0.0)):
        for line in render(usage(timeline))[1:]:
            cells = [at for at, cell in enumerate(line) if cell in (BAR, FAINT)]
            assert cells
            assert max(cells) - min(cells) < WIDTH
