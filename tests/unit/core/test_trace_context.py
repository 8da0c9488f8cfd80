"""W3C's traceparent: what is one, what counts as none, and the packed form that nodes get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.trace_context import CONTEXT_BYTES, TraceContext, parse

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN))


@pytest.mark.parametrize(
    ("traceparent", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"01-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_a_traceparent_names_a_span_and_says_whether_it_is_sampled(traceparent: str, is_sampled: bool) -> None:
    assert parse(traceparent) == (CONTEXT, is_sampled)


@pytest.mark.parametrize(
    "given_text",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
    ],
)
def test_other_text_counts_as_no_traceparent(given_text: str) -> None:
    assert parse(given_text) is None


@given(st.text(max_size=80))
def test_no_text_is_an_error(given_text: str) -> None:
    found = parse(given_text)
    assert found is None or found[0].trace_id.hex() in given_text


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8))
def test_a_packed_context_comes_back(trace_id: bytes, span_id: bytes) -> None:
    packed = TraceContext(trace_id, span_id).pack()
    assert len(packed) == CONTEXT_BYTES
    assert TraceContext.unpack(packed) == (trace_id, span_id)
