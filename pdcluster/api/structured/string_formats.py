"""Strings of each `format` as regular expressions of whole values. An expression never allows more than the format,
sometimes less, so that checkers accept every match (dates from the year 1000, hosts of at most four labels).
"""

from __future__ import annotations

from collections.abc import Mapping

_LEAP_YEAR = r"(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    r"(?:[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LATER_TIME = r"T(?:\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?|\d{1,4}M(?:\d{1,4}S)?|\d{1,4}S)"
_DAYS = r"(?:\d{1,4}Y(?:\d{1,4}M(?:\d{1,4}D)?)?|\d{1,4}M(?:\d{1,4}D)?|\d{1,4}D)"
_DURATION = rf"P(?:\d{{1,4}}W|{_DAYS}(?:{_LATER_TIME})?|{_LATER_TIME})"

_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"
_LAST_32 = rf"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "(?:" + "|".join([
    rf"(?:{_GROUP}:){{6}}{_LAST_32}",
    rf"::(?:{_GROUP}:){{5}}{_LAST_32}",
    *(rf"{_GROUP}(?::{_GROUP}){{0,{before}}}::(?:{_GROUP}:){{{4 - before}}}{_LAST_32}" for before in range(5)),
    rf"::(?:{_GROUP}:){{0,4}}{_LAST_32}",
    rf"(?:{_GROUP}(?::{_GROUP}){{0,5}})?::{_GROUP}",
    rf"(?:{_GROUP}(?::{_GROUP}){{0,6}})?::",
]) + ")"  # fmt: skip

_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,29}"
_LAST_LABEL = "[a-zA-Z](?:-?[a-zA-Z0-9]){0,29}"
_HOSTNAME = rf"(?:{_LABEL}\.){{0,3}}{_LAST_LABEL}"
_LOCAL_PART = r"[a-zA-Z0-9_%+-]{1,20}(?:\.[a-zA-Z0-9_%+-]{1,20}){0,2}"
_EMAIL = rf"{_LOCAL_PART}@(?:{_LABEL}\.){{1,3}}[a-zA-Z]{{2,24}}"

_ESCAPED = "%[0-9A-Fa-f]{2}"
_PATH_CHARACTER = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_PATH_CHARACTER_NO_COLON = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=@-]|{_ESCAPED})"
_TAIL = rf"(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?"
_PORT = r"(?::(?:[1-9]\d{0,3}|[1-5]\d{4}))?"
_AUTHORITY = rf"//(?:{_HOSTNAME}|{_IPV4}|\[{_IPV6}\]){_PORT}(?:/{_PATH_CHARACTER}*)*"
_ROOTED = rf"/(?:{_PATH_CHARACTER}+(?:/{_PATH_CHARACTER}*)*)?"
_SCHEME = "[a-zA-Z][a-zA-Z0-9+.-]{0,15}"
_URI = rf"{_SCHEME}:(?:{_AUTHORITY}|{_ROOTED}|{_PATH_CHARACTER}+(?:/{_PATH_CHARACTER}*)*){_TAIL}"
_RELATIVE = rf"(?:{_AUTHORITY}|{_ROOTED}|{_PATH_CHARACTER_NO_COLON}+(?:/{_PATH_CHARACTER}*)*|){_TAIL}"
_VARIABLE = r"[a-zA-Z0-9_]{1,32}(?:\.[a-zA-Z0-9_]{1,32}){0,3}(?:\*|:[1-9]\d{0,3})?"
_TEMPLATE = rf"(?:[a-zA-Z0-9._~!$&()*+,;=:@/?#\[\]-]|{_ESCAPED}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE}){{0,8}}\}})*"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"


def _uuid(version: str = "") -> str:
    middle = f"{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}" if version else "[0-9a-f]{4}-[0-9a-f]{4}"
    return f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{middle}-[0-9a-f]{{12}}"


KEPT: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": _uuid(),
    **{f"uuid{version}": _uuid(version) for version in "1345678"},
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "iri-reference": f"(?:{_URI}|{_RELATIVE})",
    "uri-template": _TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d{{0,8}})(?:#|{_POINTER})",
}

# Known to JSON Schema as well. Any other name is an annotation there.
NOT_KEPT = frozenset({"regex"})

# Patterns with lookarounds, which no automaton keeps, that some libraries write beside a format of KEPT (zod 4). All
# that KEPT allows fits them.
SAME_AS_FORMAT: Mapping[str, tuple[str, ...]] = {
    "duration": (r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",),
    "hostname": (
        r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
        r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$",
    ),
    "email": (r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",),
}
