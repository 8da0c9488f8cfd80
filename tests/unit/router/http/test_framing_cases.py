"""Bytes on which two readers of HTTP/1.1 may disagree, each with what is served, or the status that ends the connection.

The kinds of cases are those of h11's and llhttp's own tests and of RFC 9112. Each comes in one read, byte by byte, and
cut in two; behind each is a request that must not be taken for part of anything else.
"""

from __future__ import annotations

import re
from asyncio import Transport

import pytest

from pdcluster_router.http.connection import Connection, ConnectionLimits, Connections
from pdcluster_router.http.exchange import Exchange
from pdcluster_router.http.head import MAX_HEAD_BYTES, MAX_HEADERS

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"

SERVED = {
    "plain": (GET + b"\r\n", "GET /a "),
    "an empty header": (GET + b"b:\r\n\r\n", "GET /a "),
    "whitespace only in a header": (GET + b"b: \t \t \r\n\r\n", "GET /a "),
    "no space behind the colon": (b"GET /a HTTP/1.1\r\nhost:x\r\n\r\n", "GET /a "),
    "bytes above 127 in a header": (GET + b"b: \xff\xfe\r\n\r\n", "GET /a "),
    "an empty host": (b"GET /a HTTP/1.1\r\nhost:\r\n\r\n", "GET /a "),
    "an address as host": (b"GET /a HTTP/1.1\r\nhost: [::1]:8000\r\n\r\n", "GET /a "),
    "empty lines before": (b"\r\n\r\n" + GET + b"\r\n", "GET /a "),
    "a header that may come twice": (GET + b"accept: a\r\naccept: b\r\n\r\n", "GET /a "),
    "a query with marks": (b"GET /a?b=c?d|e HTTP/1.1\r\nhost: x\r\n\r\n", "GET /a "),
    "a target with its host": (b"GET http://x/a HTTP/1.1\r\nhost: x\r\n\r\n", "GET /a "),
    "a target with its host and no path": (b"GET http://x:1?b HTTP/1.1\r\nhost: X:1\r\n\r\n", "GET / "),
    "a path as it came": (b"GET /%61//../a HTTP/1.1\r\nhost: x\r\n\r\n", "GET /%61//../a "),
    "a fragment, which is part of it": (b"GET /a#b HTTP/1.1\r\nhost: x\r\n\r\n", "GET /a#b "),
    "two slashes": (b"GET //x/a HTTP/1.1\r\nhost: x\r\n\r\n", "GET //x/a "),
    "another method": (b"PUT /a HTTP/1.1\r\nhost: x\r\n\r\n", "PUT /a "),
    "a get with a body": (GET + b"content-length: 3\r\n\r\nabc", "GET /a abc"),
    "a body": (POST + b"content-length: 3\r\n\r\nabc", "POST /a abc"),
    "a body that looks like a request": (
        POST + b"content-length: %d\r\n\r\n%b" % (len(NEXT), NEXT),
        f"POST /a {NEXT.decode()}",
    ),
    "a length with zeros": (POST + b"content-length: 003\r\n\r\nabc", "POST /a abc"),
    "a length with spaces around": (POST + b"conTENT-Length:  3 \r\n\r\nabc", "POST /a abc"),
    "no length is no body": (POST + b"\r\n", "POST /a "),
    "chunks": (CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", "POST /a abcde"),
    "a coding in capitals": (POST + b"transfer-encoding: cHuNkEd\r\n\r\n1\r\na\r\n0\r\n\r\n", "POST /a a"),
    "sizes in both cases": (CHUNKED + b"aA\r\n" + b"b" * 170 + b"\r\n000\r\n\r\n", "POST /a " + "b" * 170),
    "extensions of chunks": (CHUNKED + b'1;a;b=c;d="e; f"\r\na\r\n0;g\r\n\r\n', "POST /a a"),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\nhost: evil\r\nauthorization: evil\r\n\r\n", "POST /a a"),
}

REFUSED = {
    # one host, one key
    "no host": (b"GET /a HTTP/1.1\r\n\r\n", 400),
    "two hosts": (GET + b"host: y\r\n\r\n", 400),
    "the same host twice": (GET + b"Host: x\r\n\r\n", 400),
    "two keys": (GET + b"authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400),
    "two admin tokens": (GET + b"x-admin-token: a\r\nx-admin-token: b\r\n\r\n", 400),
    "a list of hosts": (b"GET /a HTTP/1.1\r\nhost: x, y\r\n\r\n", 400),
    "a host with a path": (b"GET /a HTTP/1.1\r\nhost: x/y\r\n\r\n", 400),
    "a host with a user": (b"GET /a HTTP/1.1\r\nhost: x@y\r\n\r\n", 400),
    "a very long host": (b"GET /a HTTP/1.1\r\nhost: " + b"x" * 1000 + b"\r\n\r\n", 400),
    "another host in the target": (b"GET http://y/a HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a user in the target": (b"GET http://x@y/a HTTP/1.1\r\nhost: y\r\n\r\n", 400),
    # lengths
    "two lengths": (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\na", 400),
    "the same length twice": (POST + b"content-length: 1\r\ncontent-length: 1\r\n\r\na", 400),
    "a list of lengths": (POST + b"content-length: 1, 1\r\n\r\na", 400),
    "a signed length": (POST + b"content-length: +1\r\n\r\na", 400),
    "a negative length": (POST + b"content-length: -1\r\n\r\na", 400),
    "a hexadecimal length": (POST + b"content-length: 0x1\r\n\r\na", 400),
    "a space within a length": (POST + b"content-length: 1 1\r\n\r\na", 400),
    "no digits": (POST + b"content-length: abc\r\n\r\na", 400),
    "an empty length": (POST + b"content-length:\r\n\r\na", 400),
    "a length beyond 64 bits": (POST + b"content-length: 100000000000000000000\r\n\r\na", 400),
    "length before coding": (POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "coding before length": (POST + b"transfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n0\r\n\r\n", 400),
    "a length in a trailer": (CHUNKED + b"0\r\ncontent-length: 5\r\n\r\n", 400),
    # codings
    "another coding": (POST + b"transfer-encoding: gzip\r\n\r\n", 501),
    "another coding before": (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "another coding behind": (POST + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "identity": (POST + b"transfer-encoding: identity\r\n\r\n", 501),
    "an unknown coding": (POST + b"transfer-encoding: pigeons\r\n\r\n", 501),
    "almost chunked": (POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "chunked in quotes": (POST + b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n', 501),
    "chunked with a parameter": (POST + b"transfer-encoding: chunked;a=b\r\n\r\n0\r\n\r\n", 501),
    "another coding in a header of its own": (
        POST + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400
    ),
    "chunked twice": (POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a tab before": (POST + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "a coding in HTTP/1.0": (b"POST /a HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    # chunks
    "a space behind a size": (CHUNKED + b"1 \r\na\r\n0\r\n\r\n", 400),
    "a space before a size": (CHUNKED + b" 1\r\na\r\n0\r\n\r\n", 400),
    "a signed size": (CHUNKED + b"-1\r\na\r\n0\r\n\r\n", 400),
    "a size with 0x": (CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", 400),
    "a size with an underscore": (CHUNKED + b"1_0\r\na\r\n0\r\n\r\n", 400),
    "an empty size": (CHUNKED + b"\r\na\r\n0\r\n\r\n", 400),
    "a NUL in a size": (CHUNKED + b"1\x00\r\na\r\n0\r\n\r\n", 400),
    "a size beyond 64 bits": (CHUNKED + b"f" * 17 + b"\r\na\r\n0\r\n\r\n", 400),
    "a chunk that is longer than it says": (CHUNKED + b"1\r\nab1\r\n0\r\n\r\n", 400),
    "a chunk without its end's CR": (CHUNKED + b"1\r\na\n0\r\n\r\n", 400),
    "a chunk without its end's LF": (CHUNKED + b"1\r\na\r0\r\n\r\n", 400),
    "a bare LF behind a size": (CHUNKED + b"1\na\r\n0\r\n\r\n", 400),
    "bare LFs at the end": (CHUNKED + b"0\n\n", 400),
    "a bare LF in an extension": (CHUNKED + b"1;a\na\r\n0\r\n\r\n", 400),
    "an extension without a name": (CHUNKED + b"1;\r\na\r\n0\r\n\r\n", 400),
    "an extension without a semicolon": (CHUNKED + b"1 a\r\na\r\n0\r\n\r\n", 400),
    "an open quote": (CHUNKED + b'1;a="b\r\na\r\n0\r\n\r\n', 400),
    "a NUL in an extension": (CHUNKED + b"1;a\x00\r\na\r\n0\r\n\r\n", 400),
    "a folded trailer": (CHUNKED + b"0\r\nb: c\r\n d\r\n\r\n", 400),
    "very long trailers": (CHUNKED + b"0\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES, 431),
    # lines
    "a folded header": (GET + b"b: c\r\n d\r\n\r\n", 400),
    "a header folded by a tab": (GET + b"b: c\r\n\td\r\n\r\n", 400),
    "a length as a fold": (GET + b"b: c\r\n content-length: 5\r\n\r\n", 400),
    "a folded coding": (POST + b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
    "a space before the first header": (b"GET /a HTTP/1.1\r\n host: x\r\n\r\n", 400),
    "a folded name": (GET + b"b\r\n : c\r\n\r\n", 400),
    "a bare LF between headers": (GET + b"b: c\nd: e\r\n\r\n", 400),
    "a bare LF behind an empty header": (GET + b"b:\ntransfer-encoding: chunked\r\n\r\n", 400),
    "a bare LF behind the line": (b"GET /a HTTP/1.1\nhost: x\r\n\r\n", 400),
    "bare LFs": (b"GET /a HTTP/1.1\nhost: x\n\n", 400),
    "a bare CR between headers": (GET + b"b: c\rd: e\r\n\r\n", 400),
    "a bare CR behind an empty header": (GET + b"b:\rd: e\r\n\r\n", 400),
    "a CR and something at the end": (GET + b"\rZ", 400),
    "a NUL in a value": (GET + b"b: \x00\r\n\r\n", 400),
    "a control in a value": (GET + b"b: \x01\r\n\r\n", 400),
    "DEL in a value": (GET + b"b: \x7f\r\n\r\n", 400),
    # names
    "an empty name": (GET + b": b\r\n\r\n", 400),
    "a space before the colon": (GET + b"b : c\r\n\r\n", 400),
    "a tab before the colon": (GET + b"b\t: c\r\n\r\n", 400),
    "a space before the length's colon": (POST + b"content-length : 1\r\n\r\na", 400),
    "a space in a name": (GET + b"b c: d\r\n\r\n", 400),
    "a NUL in a name": (GET + b"b\x00: c\r\n\r\n", 400),
    "a CR in a name": (POST + b"content\rlength: 3\r\n\r\nabc", 400),
    "an at sign in a name": (GET + b"b@: c\r\n\r\n", 400),
    "a byte above 127 in a name": (GET + b"\xff: c\r\n\r\n", 400),
    "no colon": (GET + b"b\r\n\r\n", 400),
    # request lines
    "no method": (b"/a HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a space before": (b" " + GET + b"\r\n", 400),
    "a method in small letters": (b"get /a HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "an unknown method": (b"MKCOLA /a HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a tab behind the method": (b"GET\t/a HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a space in the target": (b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a NUL in the target": (b"GET /a\x00 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a byte above 127 in the target": (b"GET /\xce\xb4 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a relative target": (b"GET a HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "no version": (b"GET /a\r\nhost: x\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /a HTTP/0.9\r\nhost: x\r\n\r\n", 400),
    "HTTP/1.2": (b"GET /a HTTP/1.2\r\nhost: x\r\n\r\n", 400),
    "HTTP/1.10": (b"GET /a HTTP/1.10\r\nhost: x\r\n\r\n", 400),
    "HTTP/2": (b"GET /a HTTP/2.0\r\nhost: x\r\n\r\n", 400),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/5.6": (b"GET /a HTTP/5.6\r\nhost: x\r\n\r\n", 400),
    "a version in small letters": (b"GET /a http/1.1\r\nhost: x\r\n\r\n", 400),
    "something behind the version": (b"GET /a HTTP/1.1 x\r\nhost: x\r\n\r\n", 400),
    "a space behind the version": (b"GET /a HTTP/1.1 \r\nhost: x\r\n\r\n", 400),
    "another protocol": (b"GET /a ICE/1.0\r\nhost: x\r\n\r\n", 400),
    "almost HTTP": (b"GET /a IHTTP/1.0\r\nhost: x\r\n\r\n", 400),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "a response": (b"HTTP/1.1 200 OK\r\n\r\n", 400),
    # sizes
    "a very long target": (b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
    "a very long header": (GET + b"b: " + b"c" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    "very many headers": (GET + b"".join(b"h%d: a\r\n" % at for at in range(MAX_HEADERS)) + b"\r\n", 431),
}  # fmt: skip

# A connection that ends with its answer, whatever comes behind it.
LAST = {
    "HTTP/1.0": (b"GET /a HTTP/1.0\r\n\r\n", "GET /a "),
    "HTTP/1.0 with a body": (b"GET /a HTTP/1.0\r\nconTENT-Length: 5\r\n\r\nHELLO", "GET /a HELLO"),
    "close": (GET + b"connection: close\r\n\r\n", "GET /a "),
    "close before another wish": (GET + b"connection: close\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", "GET /a "),
    "close among others": (GET + b"connection: token, close, keep-alive\r\n\r\n", "GET /a "),
    "a tunnel": (b"CONNECT x:1 HTTP/1.1\r\nhost: x:1\r\n\r\n", "CONNECT x:1 "),
}


class Mirror:
    """Implements connection.Application: says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def complete(self, exchange: Exchange) -> None:
        self.asked.append(f"{exchange.method} {exchange.path} {exchange.take_body().decode()}")
        exchange.reply(200, b"")

    def begin(self, exchange: Exchange) -> None:
        pass

    late = crowded = stalled = gone = stopping = over = begin


class Wire(Transport):
    """Of a client that writes until it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3}) ", self.written)]


def asked(data: bytes, sizes: list[int]) -> tuple[list[str], list[int], bool]:
    """What the application was asked, the statuses, and whether the connection ended."""
    mirror, wire = Mirror(), Wire()
    connection = Connection(mirror, ConnectionLimits(1 << 20), Connections())
    connection.connection_made(wire)
    for size in sizes:
        part, data = data[:size], data[size:]
        if part and not wire.is_closed:
            connection.data_received(part)
    return mirror.asked, wire.statuses, wire.is_closed


def ways(data: bytes) -> list[list[int]]:
    """Sizes of reads."""
    whole, few = len(data), min(len(data), 400)
    return [
        [whole],
        [1] * whole if whole < 2000 else [1000] * (whole // 1000 + 1),
        [few // 2, whole],
        [few - 1, 1, whole],
    ]


@pytest.mark.parametrize("name", SERVED)
def test_what_is_unusual_but_clear_is_served_and_the_next_request_too(name: str) -> None:
    data, expected = SERVED[name]
    for sizes in ways(data + NEXT):
        assert asked(data + NEXT, sizes) == ([expected, "GET /next "], [200, 200], False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_clear_is_refused_and_nothing_behind_it_is_a_request(name: str) -> None:
    data, status = REFUSED[name]
    for sizes in ways(data + NEXT):
        assert asked(data + NEXT, sizes) == ([], [status], True)
    served, statuses, is_over = asked(NEXT + data + NEXT, [len(NEXT), len(data) + len(NEXT)])
    assert (served, statuses, is_over) == (["GET /next "], [200, status], True)


@pytest.mark.parametrize("name", LAST)
def test_behind_the_last_request_nothing_is_one(name: str) -> None:
    data, expected = LAST[name]
    for sizes in ways(data + NEXT):
        assert asked(data + NEXT, sizes) == ([expected], [200], True)


@pytest.mark.parametrize("size", [10_000_000, 2**63 - 1, 2**64 - 1])
def test_a_very_large_length_or_chunk_promises_bytes_and_holds_none(size: int) -> None:
    for data in (POST + b"content-length: %d\r\n\r\n" % size, CHUNKED + b"%x\r\n" % size):
        assert asked(data + NEXT, [len(data) + len(NEXT)]) == ([], [], False)


def test_as_many_headers_as_may_be_are_taken() -> None:
    data = GET + b"".join(b"h%d: a\r\n" % at for at in range(MAX_HEADERS - 1)) + b"\r\n"
    assert asked(data, [len(data)]) == (["GET /a "], [200], False)


@pytest.mark.parametrize("start", [b"1;", b"1;a=", b'1;a="'])
def test_extensions_of_chunks_are_bounded_over_the_whole_body(start: bytes) -> None:
    data = CHUNKED + start + b"a" * 2 * MAX_HEAD_BYTES
    assert asked(data, [1000] * 200) == ([], [431], True)
    chunk = start + b"a" * 1000 + b'"' * start.endswith(b'"') + b"\r\nb\r\n"
    assert asked(CHUNKED + chunk * 100, [len(CHUNKED), *[1000] * 200]) == ([], [431], True)


def test_a_body_in_chunks_of_a_byte_is_no_body_of_extensions() -> None:
    data = CHUNKED + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n"
    assert asked(data, [1000] * 400) == (["POST /a " + "a" * 50_000], [200], False)
