"""Jinja's sandbox with bounds: what a chat template computes, makes and holds ends it before it harms this process.

A template is a program from a model's files over the messages of a client. A thread cannot be ended, and one C call
cannot be interrupted, so the program itself counts, in `Meter`:

1. Every turn of a loop and every call of a macro is a step, compiled into the template. A step looks at the clock.
2. What is made is charged in bytes before it is made: output, joined text, products, powers, padded, formatted and
   replaced text, lists. Any one value has a bound, and so has their sum.
3. What looks into nested values (text of them, comparing, sorting, hashing) weighs them before, and so does every call
   but those of macros. Lists may share their items, so forty of them can stand for 2 ** 40 items.
4. Filters that take more than linear time get short texts only.

A template that meets no bound renders as in `transformers`, byte for byte.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from contextvars import ContextVar
from functools import wraps
from itertools import islice
from typing import Any, NamedTuple, cast

from jinja2 import filters, nodes, pass_environment, pass_eval_context, runtime
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer


class Bounds(NamedTuple):
    """What one rendering may take.

    seconds: that it computes; while others compute in this process, it may last up to wall_s.
    num_bytes: of all that is made meanwhile, kept or not.
    once_bytes: of one value.
    pauses: whether it gives way to other threads each millisecond.
    """

    seconds: float
    wall_s: float
    num_bytes: int
    once_bytes: int
    pauses: bool


# Beside streams, in the event loop: what a short chat takes, many times over.
BRIEF = Bounds(0.005, 0.005, 4 << 20, 1 << 20, pauses=False)
# In a thread.
PATIENT = Bounds(5.0, 30.0, 1 << 30, 32 << 20, pauses=True)

# A thread that renders holds the GIL for 5 ms at a time. The event loop would wait that long at each of its calls.
WORK_S, PAUSE_S = 0.001, 0.0005

# What an item of a list costs beside its value: about twice what it takes.
ITEM_BYTES = 64
# Text for filters whose time grows faster than their text.
SLOW_TEXT = 64 << 10
MOST_BITS = 1 << 16
MOST_INDENT = 32
MOST_PATTERN = 1024
MOST_DIGITS = 6
CHUNK = 256
# Bytes that are made sooner than the clock is read.
SMALL = 4096

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# Widths and precisions of `%` and of str.format.
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*((?:\d+|\*)?(?:\.(?:\d+|\*))?)")
_BRACES = re.compile(r"\{[^{}:]*:?([^{}]*)\}")
_WIDTH = re.compile(r"\d+|\*")
_NESTED = re.compile(r"\{[^{}]*\{")

# What compiled templates pass beside the arguments of a call.
_CONTEXT_NAMES = frozenset(("_loop_vars", "_block_vars"))
# What keys(), values() and items() give.
_VIEWS = (KeysView, ValuesView, ItemsView)
# Values that hold no others.
_PLAIN = frozenset((str, int, float, bool, type(None)))
# Filters that yield one item at a time, or look at one item only.
_LAZY = frozenset(("batch", "first", "map", "reject", "rejectattr", "select", "selectattr"))
# Filters that look at a value from outside, and their other names.
_SHALLOW = _LAZY | {"attr", "count", "d", "default", "items", "last", "length", "list", "random", "reverse", "slice"}
_SLOW = frozenset(("striptags", "title", "urlize", "wordcount", "wordwrap", "xmlattr"))
_COMPARING = frozenset(
    ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le", "in")
)


class Ended(Exception):
    """A bound was met. The text says which."""


class Starved(Ended):
    """It was not the template's fault: others computed meanwhile."""


class Meter:
    """What is left to one rendering."""

    __slots__ = ("_computes_until", "_left", "_look_at", "_until", "bounds")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self._left = bounds, bounds.num_bytes
        now = time.monotonic()
        self._until = now + bounds.wall_s
        self._computes_until = time.thread_time() + bounds.seconds
        self._look_at = now + WORK_S if bounds.pauses else self._until

    def spend(self, num_bytes: int = 0) -> None:
        """Take a step that makes a value of so many bytes. Raises Ended."""
        self._left -= num_bytes
        if num_bytes > SMALL:
            self.check_once(num_bytes)
        if self._left < 0:
            raise Ended(f"it made more than {self.bounds.num_bytes >> 20} MiB of text and lists")
        now = time.monotonic()
        if now >= self._look_at:
            self._look(now)

    def charge(self, num_bytes: int) -> None:
        """The same between two steps: the next one accounts for what is small. Raises Ended."""
        if num_bytes > SMALL:
            self.spend(num_bytes)
        else:
            self._left -= num_bytes

    def check_once(self, num_bytes: int) -> None:
        """Of one value. Raises Ended."""
        if num_bytes > self.bounds.once_bytes:
            raise Ended(f"it made one value of more than {self.bounds.once_bytes >> 20} MiB")

    def _look(self, now: float) -> None:
        if time.thread_time() >= self._computes_until:
            raise Ended(f"it took longer than {self.bounds.seconds:g} s")
        if now >= self._until:
            raise Starved(f"it was not done after {self.bounds.wall_s:g} s, beside others")
        time.sleep(PAUSE_S)
        self._look_at = min(time.monotonic() + WORK_S, self._until)


# Of the rendering that goes on in this thread. Without one, nothing that is bounded can be called: the compiler, which
# computes what is constant, leaves it to the rendering.
_METER: ContextVar[Meter] = ContextVar("meter of a chat template")


def bounded(render: Callable[[], str], bounds: Bounds) -> str:
    """Render by a template of a BoundedEnvironment. Raises Ended."""
    token = _METER.set(Meter(bounds))
    try:
        return render()
    finally:
        _METER.reset(token)


def _weigh(value: object) -> int:
    """The bytes of a value and all values in it, each as often as it occurs. Raises Ended."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, (list, tuple, Mapping, *_VIEWS)):
        return ITEM_BYTES
    meter, total, num = _METER.get(), 0, 0
    rest: list[Any] = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, Mapping):
            rest.extend(value)
            rest.extend(value.values())
        elif isinstance(value, (list, tuple, *_VIEWS)):
            rest.extend(value)
        num += 1
        if not num % CHUNK:
            meter.spend()
            meter.check_once(total + ITEM_BYTES * (num + len(rest)))
    meter.check_once(total)
    return total + num


def _plain(value: Any) -> Any:
    """The value, weighed where it holds others."""
    if type(value) not in _PLAIN:
        _weigh(value)
    return value


# Of a text that is not ASCII, beside its characters.
_TEXT_HEAD = sys.getsizeof(chr(256)) - 2 * 2


def _character_bytes(text: str) -> int:
    """Of each character of a text: 1, 2 or 4, as its widest needs."""
    return 1 if text.isascii() else min((sys.getsizeof(text) - _TEXT_HEAD) // (len(text) + 1), 4)


def _size(value: object) -> int:
    """The bytes of a value made just now, without those of its items."""
    if isinstance(value, (str, bytes)):
        return len(value) * (_character_bytes(value) if isinstance(value, str) else 1)
    return ITEM_BYTES * len(value) if isinstance(value, (list, tuple, dict)) else 0


def _made(value: Any) -> Any:
    _METER.get().charge(_size(value))
    return value


def _step(num_bytes: int) -> bool:
    _METER.get().spend(num_bytes)
    return True


def bounded_dict(pairs: Any = (), /, **named: Any) -> dict[Any, Any]:
    """As dict(), with keys that are weighed before they are hashed. Raises Ended."""
    if isinstance(pairs, Mapping):
        return dict(pairs, **named)
    return dict([_plain(_listed(pair)) for pair in _listed(pairs)], **named)


def _listed(values: Iterable[Any]) -> list[Any]:
    """A list of what may be a generator."""
    meter = _METER.get()
    if not isinstance(values, Iterator):
        if isinstance(values, Sized):
            meter.spend(ITEM_BYTES * len(values))
        return list(values)
    result: list[Any] = []
    while chunk := list(islice(values, CHUNK)):
        meter.spend(ITEM_BYTES * len(chunk))
        result += chunk
        meter.check_once(ITEM_BYTES * len(result))
    return result


# ---------------------------------------------------------------- sizes before they are made


def _replaced(text: str | bytes, old: Any, new: Any, count: int | None = None) -> int:
    num = len(text) + 1 if not old else text.count(old)
    return len(text) + (num if count is None or count < 0 else min(num, count)) * _size(new)


def _formatted(text: str | bytes, values: Iterable[Any], fields: re.Pattern[str]) -> int:
    """Of a text with fields: each as wide as it says, and as long as the longest value."""
    found = fields.findall(text if isinstance(text, str) else text.decode("latin-1"))
    longest = max(map(_weigh, values), default=0)
    total = len(text) + longest * len(found)
    for width in _WIDTH.findall(" ".join(found)):
        if width == "*" or len(width) > MOST_DIGITS:
            raise Ended(f"it formatted a text to a width of {width[:20]}; write one of up to {MOST_DIGITS} digits")
        total += int(width)
    return total


def _format_method(text: str, *args: Any, **kwargs: Any) -> int:
    plain = text.replace("{{", "").replace("}}", "")
    if _NESTED.search(plain):
        raise Ended("it formatted a text to a width from a value; write the width itself")
    return _formatted(plain, (*args, *kwargs.values()), _BRACES)


def _translated(text: str, table: Any) -> int:
    values = table.values() if isinstance(table, Mapping) else table
    return len(text) * max((len(value) for value in values if isinstance(value, str)), default=1)


def _split(text: str | bytes, sep: Any = None, maxsplit: int = -1) -> int:
    num = len(text) // 8 if sep is None else text.count(sep) if sep else 0
    return len(text) + ITEM_BYTES * (num if maxsplit < 0 else min(num, maxsplit))


def _lines(text: str, *args: Any, **kwargs: Any) -> int:
    ends = LINE_ENDS if isinstance(text, str) else (b"\n", b"\r")
    return len(text) + ITEM_BYTES * sum(map(text.count, ends))


def _padded(text: object, width: int, *args: Any, **kwargs: Any) -> int:
    return abs(width)


def _tabs(text: str | bytes, tabsize: int = 8) -> int:
    return len(text) + abs(tabsize) * text.count("\t" if isinstance(text, str) else b"\t")  # type: ignore[arg-type]


# Methods of text, bytes and numbers that make more than they got: bytes of what they make, by their arguments.
_METHODS: Mapping[str, Callable[..., int]] = {
    "center": _padded, "ljust": _padded, "rjust": _padded, "zfill": _padded, "to_bytes": _padded, "expandtabs": _tabs,
    "replace": _replaced, "translate": _translated, "format": _format_method, "format_map": _format_method,
    "split": _split, "rsplit": _split, "splitlines": _lines,
}  # fmt: skip


def _round(value: object, precision: int = 0, *args: Any, **kwargs: Any) -> int:
    return _power(10, precision)


def _indented(text: str, width: int | str = 4, *args: Any, **kwargs: Any) -> int:
    return len(text) + sum(map(str(text).count, LINE_ENDS), 1) * (width if isinstance(width, int) else len(width))


def _batched(values: object, linecount: int, fill_with: object = None) -> int:
    return ITEM_BYTES * abs(linecount)


# The same for filters, without what Jinja itself passes.
_FILTERS: Mapping[str, Callable[..., int]] = {
    "center": lambda value, width=80: _padded(value, width),
    "indent": _indented,
    "replace": lambda s, old, new, count=None: _replaced(str(s), str(old), str(new), count),
    "format": lambda value, *args, **kwargs: _formatted(str(value), (*args, *kwargs.values()), _PERCENT),
    "batch": _batched, "slice": _batched, "round": _round,
}  # fmt: skip


def _power(base: Any, exponent: Any) -> int:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        _check_bits(base.bit_length() * exponent)
    return 0


def _product(left: Any, right: Any) -> int:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
            return _size(value) * max(times, 0)
    return _quotient(left, right)


def _quotient(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return 0


def _remainder(left: Any, right: Any) -> int:
    if isinstance(left, (str, bytes)):
        values = right if isinstance(right, tuple) else right.values() if isinstance(right, Mapping) else (right,)
        return _formatted(left, values, _PERCENT)
    return _quotient(left, right)


def _sum(left: Any, right: Any) -> int:
    if isinstance(left, str) and isinstance(right, str):
        return (len(left) + len(right)) * max(_character_bytes(left), _character_bytes(right))
    return _size(left) + _size(right)


def _difference(left: Any, right: Any) -> int:
    """Of the keys of dicts it hashes what is taken away."""
    for value in (left, right):
        if isinstance(value, Iterator):
            raise TypeError("a generator cannot be subtracted; make a list of it")
        _plain(value)
    return 0


def _check_bits(num_bits: int) -> None:
    if num_bits > MOST_BITS:
        raise Ended(f"it computed with a number of more than {MOST_BITS} bits")


_OPERATORS: Mapping[str, Callable[[Any, Any], int]] = {
    "+": _sum, "-": _difference, "*": _product, "**": _power, "%": _remainder, "//": _quotient,
}  # fmt: skip


# ---------------------------------------------------------------- filters and tests


def check_indent(indent: object) -> None:
    """Raises Ended."""
    if (indent if isinstance(indent, int) else len(indent) if isinstance(indent, str) else 0) > MOST_INDENT:
        raise Ended(f"it indented JSON by more than {MOST_INDENT}")


def check_pattern(pattern: str) -> None:
    """Raises Ended."""
    if len(pattern) > MOST_PATTERN:
        raise Ended(f"it formatted a date by more than {MOST_PATTERN} characters")


@pass_eval_context
def _join(eval_ctx: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(eval_ctx.environment, attribute), value)
    parts = _listed(value)
    _METER.get().spend(sum(map(_weigh, parts)) + len(str(d)) * len(parts))
    return filters.sync_do_join(eval_ctx, parts, d)


@pass_environment
def _total(environment: BoundedEnvironment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """As sum(), by operators that are bounded: of lists it takes the square of their number."""
    if isinstance(start, (str, bytes)):
        raise TypeError("sum() can't sum text; use join")
    if attribute is not None:
        iterable = map(filters.make_attrgetter(environment, attribute), iterable)
    for value in iterable:
        _METER.get().spend(_sum(start, value))
        start = start + value
    return start


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    at = int(hasattr(function, "jinja_pass_arg"))
    foresee, is_lazy, looks_deep, is_slow = _FILTERS.get(name), name in _LAZY, name not in _SHALLOW, name in _SLOW

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        value = args[at] if len(args) > at else None
        if is_lazy and isinstance(value, (str, bytes)):
            meter.spend(ITEM_BYTES * len(value))
        elif isinstance(value, Iterator) and not is_lazy:
            args = (*args[:at], _listed(value), *args[at + 1 :])
        if looks_deep:
            for given in (*args[at:], *kwargs.values()):
                _plain(given)
        if is_slow and len(text := str(value)) > SLOW_TEXT:
            raise Ended(f"it used the filter {name} on {len(text)} characters; {SLOW_TEXT} are possible")
        if foresee is not None:
            meter.spend(foresee(*args[at:], **kwargs))
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        meter.charge(_size(result))
        return result

    return call


def _metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    def test(*args: Any) -> Any:
        return function(*map(_plain, args))

    return test


# ---------------------------------------------------------------- what is compiled into a template


def _literal_bytes(parts: Iterable[nodes.Node]) -> int:
    """Of the lists and such that are written in these parts of a template."""
    kinds = (nodes.List, nodes.Tuple, nodes.Dict)
    return sum(
        ITEM_BYTES * (1 + len(node.items)) for part in parts for kind in kinds for node in (part, *part.find_all(kind))
        if isinstance(node, kind)
    )  # fmt: skip


class _Instrument(NodeTransformer):
    """Puts the steps into a parsed template, and weighs where nested values are compared or looked up."""

    def _steps(self, body: list[nodes.Node], lineno: int) -> nodes.Test:
        weight = nodes.Const(_literal_bytes(body), lineno=lineno)
        return nodes.Test(weight, "_step", [], [], None, None, lineno=lineno)

    def _weighed(self, node: nodes.Expr, name: str = "_plain") -> nodes.Expr:
        if isinstance(node, nodes.Const):
            return node
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(self._steps([node.test], node.lineno), node.test, lineno=node.lineno)
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_step(self.generic_visit(node))

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_step(self.generic_visit(node))

    def _with_step(self, node: Any) -> nodes.Node:
        step = self._steps(node.body, node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = (node.expr, *(operand.expr for operand in node.ops))
        if sum(not isinstance(operand, nodes.Const) for operand in operands) > 1:
            node.expr = self._weighed(node.expr)
            for operand in node.ops:
                operand.expr = self._weighed(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return self._weighed(node, "_made")
        node.arg = self._weighed(node.arg)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = self._weighed(pair.key)
        return node


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_text(context.eval_ctx, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Its templates render by `bounded` only."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(_OPERATORS)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_plain, **options)
        self.globals.pop("lipsum")  # random text of any length
        self.globals["dict"] = bounded_dict
        self.filters |= {"join": _join, "sum": _total, "list": _listed}

    def bound(self) -> None:
        """Bound the filters and tests, once all of them are there."""
        self.filters = {
            **{name: _metered_filter(name, function) for name, function in self.filters.items()},
            "_plain": _plain,
            "_made": _made,
        }
        bounded_tests = {name: _metered_test(cast("Any", self.tests[name])) for name in _COMPARING}
        self.tests = {**self.tests, **bounded_tests, "_step": _step}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument().visit(source), *args, **kwargs)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a template, a macro or a block puts out."""
        meter, rest, texts, total = _METER.get(), iter(pieces), list[str](), 0
        while chunk := list(islice(rest, CHUNK)):
            size = sum(map(len, chunk))
            meter.charge(size)
            texts += chunk
            total += size
            if total > SMALL:
                meter.check_once(total)
        return "".join(texts)

    def join_text(self, eval_ctx: EvalContext, parts: tuple[Any, ...]) -> str:
        """The operator ~."""
        _METER.get().charge(sum([len(part) if type(part) is str else _weigh(part) for part in parts]))
        return runtime.markup_join(parts) if eval_ctx.autoescape else runtime.str_join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # what templates mostly do
            _METER.get().charge(_sum(left, right))
            return left + right
        _METER.get().charge(_OPERATORS[operator](left, right))
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter, method = _METER.get(), getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            if method.__name__ == "join" and isinstance(owner, Sized):
                args = tuple(map(_listed, args))
                num_bytes = sum(map(_weigh, *args)) + len(owner) * len(args[0]) if args else 0
                meter.spend(num_bytes)
            elif (foresee := _METHODS.get(method.__name__)) is not None:
                given = {name: value for name, value in kwargs.items() if name not in _CONTEXT_NAMES}
                meter.spend(foresee(owner, *args, **given))
        elif isinstance(owner, _VIEWS):
            args = tuple(_listed(value) if isinstance(value, Iterator) else value for value in args)
        if not isinstance(__obj, runtime.Macro):  # what is called may compare, hash or write all that is in them
            for value in args:
                _plain(value)
            for name, value in kwargs.items():
                if name not in _CONTEXT_NAMES:
                    _plain(value)
        result = super().call(__context, __obj, *args, **kwargs)
        meter.charge(_size(result))
        return result
