"""Exact regular expressions of JSON numbers between bounds of any number of digits.

Numbers without a bound have as many digits as readers keep: 19 before the point, 15 behind it. No number is so large
that a reader takes it for infinite, or so near to a bound that a reader rounds it to an excluded one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext

import msgspec

DIGITS = 19
FRACTION_DIGITS = 15
# Beyond it a float holds no fraction, and not every whole number.
EXACT = 2**53

NUMBER = (
    rf"(-?(0|[1-9][0-9]{{0,{DIGITS - 1}}})(\u002e[0-9]{{1,{FRACTION_DIGITS}}})?([eE][+\u002d]?[0-9]{{1,2}})?)".replace(
        "-?", r"(\u002d)?"
    )
)

Value = int | float


class Bounds(msgspec.Struct, frozen=True):
    """None means: no bound. above, below: the bound is excluded."""

    least: Value | None = None
    most: Value | None = None
    above: Value | None = None
    below: Value | None = None

    @property
    def given(self) -> list[Value]:
        return [bound for bound in (self.least, self.most, self.above, self.below) if bound is not None]


# ---------------------------------------------------------------- whole numbers


def integers(bounds: Bounds) -> str | None:
    """None when there are none."""
    lows = [math.ceil(each) for each in _some(bounds.least)] + [math.floor(each) + 1 for each in _some(bounds.above)]
    highs = [math.floor(each) for each in _some(bounds.most)] + [math.ceil(each) - 1 for each in _some(bounds.below)]
    far = (
        10 ** max(DIGITS, *(len(str(abs(each))) + 1 for each in (*lows, *highs, 0))) - 1
        if lows or highs
        else 10**DIGITS - 1
    )
    low, high = max(lows, default=-far), min(highs, default=far)
    return _joined(_whole(low, high)) if low <= high else None


def _some(value: Value | None) -> list[Value]:
    return [] if value is None else [value]


def _whole(low: int, high: int) -> Iterator[str]:
    if low < 0:
        yield from (r"\u002d" + each for each in _natural(max(1, -high), -low))
    if low <= 0 <= high:
        yield "0"
    if high > 0:
        yield from _natural(max(1, low), high)


def _natural(low: int, high: int) -> Iterator[str]:
    """Both above 0."""
    first, last = str(low), str(high)
    if len(first) == len(last):
        yield from _between(first, last)
        return
    shortest, longest = len(first), len(last)
    if first != "1" + "0" * (shortest - 1):
        yield from _between(first, "9" * shortest)
        shortest += 1
    if last.strip("9"):
        yield from _between("1" + "0" * (longest - 1), last)
        longest -= 1
    if shortest <= longest:
        yield f"[1-9][0-9]{{{shortest - 1},{longest - 1}}}"


def _between(low: str, high: str) -> Iterator[str]:
    """Digits of equal number."""
    same = next((index for index, pair in enumerate(zip(low, high, strict=True)) if pair[0] != pair[1]), len(low))
    head, low, high = low[:same], low[same:], high[same:]
    if not low:
        yield head
        return
    if not low.strip("0") and not high.strip("9"):
        yield head + _digits(len(low))
        return
    first, last = int(low[0]), int(high[0])
    if not low[1:].strip("0"):
        first -= 1
    else:
        yield from (head + low[0] + each for each in _at_least(low[1:]))
    if not high[1:].strip("9"):
        last += 1
    else:
        yield from (head + high[0] + each for each in _at_most(high[1:]))
    if first + 1 <= last - 1:
        yield head + _digit(first + 1, last - 1) + _digits(len(low) - 1)


def _at_least(low: str) -> Iterator[str]:
    yield low
    for index, digit in enumerate(low):
        if digit != "9":
            yield low[:index] + _digit(int(digit) + 1, 9) + _digits(len(low) - index - 1)


def _at_most(high: str) -> Iterator[str]:
    yield high
    for index, digit in enumerate(high):
        if digit != "0":
            yield high[:index] + _digit(0, int(digit) - 1) + _digits(len(high) - index - 1)


def _digit(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def _digits(number: int) -> str:
    return f"[0-9]{{{number}}}" if number else ""


def _joined(options: Iterator[str] | list[str]) -> str:
    return f"({'|'.join(options)})"


# ---------------------------------------------------------------- numbers with a fraction


def numbers(bounds: Bounds) -> str | None:
    """None when there are none."""
    if not bounds.given:
        return NUMBER
    lows, highs = _some(bounds.least) + _some(bounds.above), _some(bounds.most) + _some(bounds.below)
    if any(abs(each) > EXACT for each in bounds.given):
        near = Bounds(*(_nearer(each) for each in (bounds.least, bounds.most, bounds.above, bounds.below)))
        is_far = any(each > EXACT for each in lows) or any(each < -EXACT for each in highs)
        options = [integers(bounds), None if is_far else numbers(near)]
        return _joined([option for option in options if option is not None]) if any(options) else None
    with localcontext(prec=800):
        least = max(
            [_decimal(each) for each in _some(bounds.least)] + [_next(each, up=True) for each in _some(bounds.above)],
            default=None,
        )
        most = min(
            [_decimal(each) for each in _some(bounds.most)] + [_next(each, up=False) for each in _some(bounds.below)],
            default=None,
        )
        return None if least is not None and most is not None and least > most else _joined(_decimals(least, most))


def _nearer(bound: Value | None) -> Value | None:
    """Where fractions are exact."""
    return None if bound is None else max(min(bound, EXACT), -EXACT)


def _decimal(value: Value) -> Decimal:
    return Decimal(repr(value))


def _next(bound: Value, *, up: bool) -> Decimal:
    """The nearest number that a reader does not take for the bound, with few digits where possible."""
    exact = _decimal(bound)
    unit = Decimal(1).scaleb(-max(FRACTION_DIGITS - len(str(abs(int(exact)))) + (abs(exact) < 1), 1))
    near = exact.quantize(unit, ROUND_FLOOR) + unit if up else exact.quantize(unit, ROUND_CEILING) - unit
    if (float(near) > bound) if up else (float(near) < bound):
        return near
    return Decimal(repr(math.nextafter(float(bound), math.inf if up else -math.inf)))


def _decimals(low: Decimal | None, high: Decimal | None) -> Iterator[str]:
    """A negative number mirrors a positive one."""
    zero = Decimal(0)
    if low is None or low < 0:
        yield from (
            r"\u002d" + each
            for each in _positive(zero if high is None else max(-high, zero), None if low is None else -low)
        )
    if high is None or high >= 0:
        yield from _positive(zero if low is None else max(low, zero), high)


def _positive(low: Decimal, high: Decimal | None) -> Iterator[str]:
    places = max(FRACTION_DIGITS, *(-int(each.as_tuple().exponent) for each in (low, high or low)))
    first, low_rest = _split(low, places)
    last, high_rest = (10**DIGITS - 1, "9" * places) if high is None else _split(high, places)
    if first == last:
        yield from _fractions(str(first), low_rest, high_rest)
        return
    if low_rest.strip("0"):
        yield from _fractions(str(first), low_rest, "9" * places)
        first += 1
    if high_rest.strip("9"):
        yield from _fractions(str(last), "0" * places, high_rest)
        last -= 1
    if first <= last:
        yield _joined(_whole(first, last)) + rf"(\u002e[0-9]{{1,{places}}})?"


def _split(value: Decimal, places: int) -> tuple[int, str]:
    whole, rest = divmod(int(value.scaleb(places)), 10**places)
    return whole, str(rest).zfill(places)


def _fractions(whole: str, low: str, high: str) -> Iterator[str]:
    """A whole number and its possible fractions. Missing digits count as zeros."""
    if not low.strip("0"):
        yield whole
    same = next((index for index, pair in enumerate(zip(low, high, strict=True)) if pair[0] != pair[1]), len(low))
    point = whole + r"\u002e"
    for length in range(1, same + 1):  # while both are equal, no more digits may follow
        if not low[length:].strip("0"):
            yield point + low[:length]
    if same == len(low):
        return
    head, first, last, rest = point + low[:same], int(low[same]), int(high[same]), len(low) - same - 1
    if first + 1 <= last - 1:
        yield head + _digit(first + 1, last - 1) + _up_to(rest)
    yield from (head + low[same] + each for each in _no_less(low[same + 1 :]))
    yield from (head + high[same] + each for each in _no_more(high[same + 1 :]))


def _no_less(low: str) -> Iterator[str]:
    if not low.strip("0"):
        yield _up_to(len(low))
        return
    for index in range(len(low) + 1):
        if not low[index:].strip("0"):
            yield low[:index]
        if index < len(low) and low[index] != "9":
            yield low[:index] + _digit(int(low[index]) + 1, 9) + _up_to(len(low) - index - 1)


def _no_more(high: str) -> Iterator[str]:
    if not high.strip("9"):
        yield _up_to(len(high))
        return
    for index in range(len(high) + 1):
        yield high[:index]
        if index < len(high) and high[index] != "0":
            yield high[:index] + _digit(0, int(high[index]) - 1) + _up_to(len(high) - index - 1)


def _up_to(number: int) -> str:
    return f"[0-9]{{0,{number}}}" if number else ""
