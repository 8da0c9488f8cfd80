"""Types as people write them for tools and answers, and the JSON schemas that pydantic makes of them.

`schemas()` has them by name. Some go through the openai package, which makes them strict.
"""

# Annotations are read by pydantic: no `from __future__ import annotations` here.
import dataclasses
import datetime
import decimal
import enum
import ipaddress
import pathlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar

import openai
import pydantic
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, Json, RootModel, TypeAdapter
from typing_extensions import TypedDict

Schema = dict[str, Any]

WRITTEN: dict[str, Any] = {}
# Ways to write a type's schema, other than the usual one.
SERIALIZED: dict[str, Any] = {}
STRICT: dict[str, type[BaseModel]] = {}


def schemas() -> dict[str, Schema]:
    """All that are written here, by the name of the type."""
    usual = {name: TypeAdapter(kind).json_schema() for name, kind in WRITTEN.items()}
    sent = {f"{name}, sent": TypeAdapter(kind).json_schema(mode="serialization") for name, kind in SERIALIZED.items()}
    strict = {f"{name}, strict": _strict(model) for name, model in STRICT.items()}
    return usual | sent | strict


def _strict(model: type[BaseModel]) -> Schema:
    return dict(openai.pydantic_function_tool(model)["function"]["parameters"])


def written(*kinds: dict[str, Any]) -> Callable[[Any], Any]:
    def keep(kind: Any) -> Any:
        for each in kinds or (WRITTEN,):
            each[kind.__name__] = kind
        return kind

    return keep


# ---------------------------------------------------------------- plain models


@written(WRITTEN, STRICT)
class Weather(BaseModel):
    """Current weather of a place."""

    city: str = Field(description="City and country")
    unit: Literal["celsius", "fahrenheit"] = "celsius"
    days: int = Field(1, ge=1, le=14)


@written(WRITTEN, STRICT)
class Answer(BaseModel):
    reasoning: str
    answer: str
    confidence: float = Field(ge=0, le=1)


@written()
class Empty(BaseModel):
    pass


@written(WRITTEN, STRICT)
class Step(BaseModel):
    explanation: str
    output: str


@written(WRITTEN, STRICT)
class Solution(BaseModel):
    steps: list[Step]
    final_answer: str


class Address(BaseModel):
    street: str
    city: str
    postcode: str = Field(pattern=r"^\d{5}$")
    country: str = Field(min_length=2, max_length=2)


@written(WRITTEN, STRICT)
class Person(BaseModel):
    name: str
    age: int | None = None
    address: Address
    former: list[Address] = []


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mood(enum.StrEnum):
    GOOD = enum.auto()
    BAD = enum.auto()


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"
    NONE = None


@written(WRITTEN, STRICT)
class Paint(BaseModel):
    color: Color
    level: Level = Level.LOW
    mood: Mood | None = None


@written()
class Enumerated(BaseModel):
    any_of_them: Mixed
    one: Literal["only"]
    many: Literal["a", 1, None, True]
    nested: list[Literal["x", "y"]] | None = None


@written(WRITTEN, SERIALIZED)
class Defaults(BaseModel):
    text: str = 'with "quotes" and \\'
    number: float = 0.5
    flag: bool = True
    many: list[int] = Field(default_factory=list)
    table: dict[str, int] = {"a": 1}


@written(WRITTEN, SERIALIZED)
class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    user_id: int = Field(alias="userId")
    e_mail: str = Field(serialization_alias="eMail", validation_alias="e-mail")
    from_: str = Field(alias="from", default="")


@written(WRITTEN, STRICT)
class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    tags: list[str] = []


@written()
class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str


@written()
class Described(BaseModel):
    """Text about it."""

    model_config = ConfigDict(
        title="A title", json_schema_extra={"examples": [{"query": "x"}], "x-internal": True, "deprecated": False}
    )

    query: str = Field(title="Query", description="What to search", examples=["cats", "dogs"])
    old: str | None = Field(None, deprecated=True)


@written(WRITTEN, SERIALIZED)
class ForwardOutput(BaseModel):
    width: float
    height: float

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> float:
        return self.width * self.height


@written()
class CamelCase(BaseModel):
    model_config = ConfigDict(alias_generator=lambda name: name.title().replace("_", ""))

    first_name: str
    last_name: str | None


@written()
class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, str_strip_whitespace=True, str_max_length=20, use_enum_values=True)

    name: str
    color: Color


# ---------------------------------------------------------------- unions


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Bird(BaseModel):
    kind: Literal["bird", "parrot"]
    can_fly: bool


@written()
class Pet(BaseModel):
    pet: Annotated[Cat | Bird, Field(discriminator="kind")]


@written(WRITTEN, SERIALIZED)
class DefaultKind(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


@written()
class ClosedKinds(BaseModel):
    class Search(BaseModel):
        model_config = ConfigDict(extra="forbid")
        action: Literal["search"]
        query: str

    class Stop(BaseModel):
        model_config = ConfigDict(extra="forbid")
        action: Literal["stop"]

    step: Annotated[Search | Stop, Field(discriminator="action")]


@written(WRITTEN, STRICT)
class PlainUnion(BaseModel):
    value: int | str | bool | None
    pet: Cat | Dog
    items: list[int] | list[str]


@written()
class UnionOfNumbers(BaseModel):
    value: int | float
    bound: Annotated[int, Field(ge=0)] | Annotated[float, Field(lt=0)]


@written()
class OptionalNested(BaseModel):
    address: Address | None = None
    color: Color | None = Color.RED
    many: list[Address] | None = None


WRITTEN["a union at the top"] = Annotated[Cat | Bird, Field(discriminator="kind")]
WRITTEN["a union of primitives"] = int | str | None
WRITTEN["a list of unions"] = list[Cat | Dog | Literal["none"]]


# ---------------------------------------------------------------- recursion


@written(WRITTEN, STRICT)
class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


@written(WRITTEN, STRICT)
class Linked(BaseModel):
    value: str
    next: "Linked | None"


@written()
class Employee(BaseModel):
    name: str
    team: "Team | None" = None


@written()
class Team(BaseModel):
    lead: Employee | None = None
    members: list[Employee] = []


class Leaf(BaseModel):
    kind: Literal["leaf"]
    value: float


class Sum(BaseModel):
    kind: Literal["sum"]
    parts: list["Term"]


class Negated(BaseModel):
    kind: Literal["not"]
    part: "Term"


Term = Annotated[Leaf | Sum | Negated, Field(discriminator="kind")]
Sum.model_rebuild()
Negated.model_rebuild()


@written()
class Expression(BaseModel):
    term: Term


@written(WRITTEN, STRICT)
class Widget(BaseModel):
    """A user interface, as in OpenAI's documentation."""

    type: Literal["div", "button", "header", "section", "field", "form"]
    label: str
    children: list["Widget"]
    attributes: list["Attribute"]


class Attribute(BaseModel):
    name: str
    value: str


Widget.model_rebuild()


# ---------------------------------------------------------------- numbers


@written()
class Integers(BaseModel):
    least: int = Field(ge=3)
    most: int = Field(le=-3)
    above: int = Field(gt=0)
    below: int = Field(lt=100)
    between: pydantic.conint(gt=-5, lt=5)  # type: ignore[valid-type]
    positive: pydantic.PositiveInt
    not_negative: pydantic.NonNegativeInt
    negative: pydantic.NegativeInt


@written()
class Floats(BaseModel):
    share: float = Field(ge=0, le=1)
    open_share: pydantic.confloat(gt=0, lt=1)  # type: ignore[valid-type]
    positive: pydantic.PositiveFloat
    not_positive: pydantic.NonPositiveFloat
    finite: pydantic.FiniteFloat
    temperature: float = Field(1.0, ge=-273.15, lt=1e6)


@written()
class Multiples(BaseModel):
    tens: int = Field(multiple_of=10)
    price: float = Field(ge=0, le=1000, multiple_of=0.01)
    quarter: pydantic.confloat(multiple_of=0.25, ge=-1, le=1)  # type: ignore[valid-type]
    even: int = Field(ge=0, le=100, multiple_of=2)


@written()
class Strictness(BaseModel):
    whole: pydantic.StrictInt
    text: pydantic.StrictStr
    flag: pydantic.StrictBool
    big: int = Field(ge=0, le=2**63 - 1)
    byte: int = Field(ge=0, le=255)


@written(WRITTEN, SERIALIZED)
class Money(BaseModel):
    amount: decimal.Decimal
    exact: decimal.Decimal = Field(max_digits=6, decimal_places=2)
    bounded: decimal.Decimal = Field(ge=0, le=100)


# ---------------------------------------------------------------- texts


@written()
class Texts(BaseModel):
    short: str = Field(max_length=10)
    long: str = Field(min_length=20)
    between: pydantic.constr(min_length=2, max_length=4)  # type: ignore[valid-type]
    exact: str = Field(min_length=3, max_length=3)


@written()
class Patterns(BaseModel):
    anchored: Annotated[str, Field(pattern=r"^[A-Z]{3}-\d{4}$")]
    open: Annotated[str, Field(pattern=r"\d+")]
    at_start: str = Field(pattern=r"^https?://")
    at_end: str = Field(pattern=r"\.(png|jpe?g)$")
    phone: str = Field(pattern=r"^\+[1-9]\d{1,14}$")
    slug: str = Field(pattern=r"^[a-z0-9]+(?:-[a-z0-9]+)*$")


@written()
class BoundedPattern(BaseModel):
    code: str = Field(pattern=r"^[a-z]+$", min_length=3, max_length=8)
    open: str = Field(pattern=r"[0-9]", min_length=2, max_length=6)


@written()
class Lookahead(BaseModel):
    password: str = Field(json_schema_extra={"pattern": r"^(?=.*\d)[a-zA-Z\d]{8,}$"})


@written()
class WordPattern(BaseModel):
    word: str = Field(pattern=r"\bword\b")


@written()
class Classes(BaseModel):
    name: str = Field(pattern=r"^[\w.+-]+$")
    text: str = Field(pattern=r"^\S[\s\S]*$")
    letter: str = Field(pattern=r"^\p{L}+$")


@written()
class Escaped(BaseModel):
    path: str = Field(pattern=r'^(?:[^"\\]|\\.)*$', max_length=12)
    unicode: str = Field(pattern=r"^[ä-ü]{1,3}$")
    regex: re.Pattern[str]


@written()
class Constrained(BaseModel):
    upper: Annotated[str, pydantic.StringConstraints(to_upper=True, min_length=1)]
    lower: Annotated[str, pydantic.StringConstraints(pattern="^[a-z]$", strip_whitespace=True)]


# ---------------------------------------------------------------- formats


@written()
class Moments(BaseModel):
    date: datetime.date
    moment: datetime.datetime
    time: datetime.time
    span: datetime.timedelta
    aware: pydantic.AwareDatetime
    past: pydantic.PastDate | None = None


@written()
class BoundedDates(BaseModel):
    start: datetime.date = Field(ge=datetime.date(2020, 1, 1))
    end: datetime.date


@written()
class Identifiers(BaseModel):
    any: uuid.UUID
    random: pydantic.UUID4
    old: pydantic.UUID1 | None = None


@written()
class Addresses(BaseModel):
    v4: ipaddress.IPv4Address
    v6: ipaddress.IPv6Address
    either: pydantic.IPvAnyAddress


@written()
class Networks(BaseModel):
    v4: ipaddress.IPv4Network
    v6: ipaddress.IPv6Interface


@written()
class Contact(BaseModel):
    email: str = Field(json_schema_extra={"format": "email"})
    host: str = Field(json_schema_extra={"format": "hostname"})


@written()
class Links(BaseModel):
    any: AnyUrl
    web: pydantic.HttpUrl
    short: pydantic.HttpUrl | None = Field(None, max_length=100)


@written()
class Files(BaseModel):
    path: pathlib.Path
    file: pydantic.FilePath
    directory: pydantic.DirectoryPath


@written()
class Binary(BaseModel):
    data: bytes
    short: bytes = Field(max_length=8)
    encoded: pydantic.Base64Bytes
    text: pydantic.Base64Str


@written(WRITTEN, SERIALIZED)
class Secrets(BaseModel):
    password: pydantic.SecretStr
    token: Json[dict[str, int]]
    any: Json[Any] = "{}"


@written()
class OwnFormats(BaseModel):
    color: str = Field(json_schema_extra={"format": "color"})
    phone: str = Field(json_schema_extra={"format": "phone"})


@written()
class NumberFormats(BaseModel):
    """As generators of clients write them."""

    small: int = Field(json_schema_extra={"format": "int32"})
    large: int = Field(json_schema_extra={"format": "int64"})
    single: float = Field(json_schema_extra={"format": "float"})


# ---------------------------------------------------------------- collections


@written()
class Lists(BaseModel):
    any: list
    texts: list[str]
    bounded: pydantic.conlist(int, min_length=1, max_length=3)  # type: ignore[valid-type]
    at_least: list[float] = Field(min_length=2)
    nested: list[list[bool]] = Field(max_length=2)
    sequence: Sequence[int] = ()


@written()
class IntegerSet(BaseModel):
    numbers: set[int]


@written()
class FrozenSet(BaseModel):
    names: frozenset[Literal["a", "b"]] = frozenset()


@written()
class BoundedSet(BaseModel):
    names: pydantic.conset(str, max_length=1)  # type: ignore[valid-type]


@written()
class Tuples(BaseModel):
    point: tuple[float, float]
    mixed: tuple[int, str, bool]
    many: tuple[int, ...]
    none: tuple[()] = ()


@written()
class Tables(BaseModel):
    counts: dict[str, int]
    any: dict
    values: dict[str, Any]
    nested: dict[str, dict[str, list[int]]]
    people: Mapping[str, Address]


@written()
class LiteralKeys(BaseModel):
    scores: dict[Literal["a", "b"], int]


@written()
class EnumKeys(BaseModel):
    names: dict[Color, str]


@written()
class IntegerKeys(BaseModel):
    names: dict[int, str]


@written()
class UuidKeys(BaseModel):
    names: dict[uuid.UUID, int]


@written()
class PatternKeys(BaseModel):
    names: dict[Annotated[str, Field(pattern="^[a-z]{1,4}$")], int]


@written()
class BoundedTable(BaseModel):
    names: dict[str, int] = Field(min_length=1)


@written()
class ShortTable(BaseModel):
    names: dict[str, int] = Field(min_length=1, max_length=3)


@written()
class Anything(BaseModel):
    any: Any
    thing: object
    required: Any = None


# ---------------------------------------------------------------- other kinds of types


@written()
class Typed(TypedDict):
    name: str
    age: NotRequired[int]


@written()
class Loose(TypedDict, total=False):
    """Nothing of it must be there."""

    query: str
    limit: Annotated[int, Field(ge=1, le=100)]


@written()
@pydantic.with_config(ConfigDict(extra="forbid"))
class ClosedTyped(TypedDict):
    name: str
    points: list[tuple[int, int]]


@written()
@dataclasses.dataclass
class Data:
    name: str
    count: int = 0
    parts: list[str] = dataclasses.field(default_factory=list)


@written()
@pydantic.dataclasses.dataclass(config=ConfigDict(extra="forbid"))
class CheckedData:
    name: Annotated[str, Field(min_length=1)]
    child: "CheckedData | None" = None


@written()
class Point(NamedTuple):
    x: float
    y: float = 0.0


@written()
class Names(RootModel[list[str]]):
    pass


@written()
class Scores(RootModel[dict[str, Annotated[int, Field(ge=0, le=10)]]]):
    pass


Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    items: list[Item]
    total: int
    next: str | None = None


WRITTEN["a page of people"] = Page[Person]
WRITTEN["a page of pages"] = Page[Page[int]]
STRICT["a page of steps"] = Page[Step]


@written()
class Forest(BaseModel):
    by_name: dict[str, Tree]
    first: Tree | None = None


@written()
class Base(BaseModel):
    id: int


@written()
class Derived(Base):
    name: str
    base: Base


WRITTEN["a list of models"] = list[Cat]
WRITTEN["a boolean"] = bool
WRITTEN["a literal"] = Literal["yes", "no", "unsure"]
WRITTEN["an enum"] = Color
WRITTEN["a bounded number"] = Annotated[float, Field(gt=0, le=5)]
WRITTEN["a table of lists"] = dict[str, list[int | None]]
WRITTEN["a date or a text"] = datetime.date | Annotated[str, Field(pattern="^(today|tomorrow)$")]


def _arguments(city: str, days: int = 3, *, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> None:
    """Arguments of a tool, as frameworks read them off a function."""


WRITTEN["arguments of a function"] = _arguments


# ---------------------------------------------------------------- what tools are really asked for


@written(WRITTEN, STRICT)
class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


@written()
class Invoice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    class Line(BaseModel):
        description: str = Field(min_length=1, max_length=80)
        quantity: int = Field(ge=1, le=1000)
        unit_price: float = Field(ge=0)
        tax: Literal[0, 7, 19] = 19

    number: str = Field(pattern=r"^INV-\d{6}$")
    issued: datetime.date
    due: datetime.date | None = None
    currency: Literal["EUR", "USD", "CHF"]
    lines: list[Line] = Field(min_length=1, max_length=20)


@written(WRITTEN, STRICT)
class Moderation(BaseModel):
    violates: bool
    category: Literal["violence", "sexual", "self_harm"] | None
    explanation_if_violating: str | None


@written()
class SqlQuery(BaseModel):
    class Condition(BaseModel):
        column: str
        operator: Literal["=", ">", "<", "<=", ">=", "!="]
        value: str | int | float

    table_name: Literal["orders", "products"]
    columns: list[Literal["id", "status", "delivery_date"]]
    conditions: list[Condition]
    order_by: Literal["asc", "desc"]


@written(WRITTEN, STRICT)
class Entities(BaseModel):
    class Entity(BaseModel):
        text: str
        label: Literal["PER", "ORG", "LOC"]
        start: int
        end: int

    entities: list[Entity]


@written()
class Plan(BaseModel):
    class Call(BaseModel):
        tool: Literal["search", "read"]
        arguments: dict[str, str | int | bool | list[str]]

    thought: str
    calls: list[Call] = Field(max_length=3)
    depends_on: dict[str, list[str]] = {}
    timeout: datetime.timedelta = datetime.timedelta(seconds=30)
