"""The reader of ClientHellos: real ones as they are, and every trick that two readers could take in two ways."""

from __future__ import annotations

import ssl

import pytest

from sandbox.network.tls.client_hello import HELLO_BYTES, SKIPPED_BYTES, AnswerReader, Hello, HelloReader, Refused
from tests import hello_kit as kit

NAME = "api.example.com"


def read(data: bytes, *, again: bool = False) -> Hello | str | None:
    """The hello, the code of the refusal, or None when more is wanted."""
    try:
        return HelloReader(again=again).feed(data)
    except Refused as refusal:
        return refusal.code


def named(*extensions: bytes) -> bytes:
    """A hello for NAME with these extensions besides."""
    return kit.hello(NAME, *extensions)


def test_real_hello_is_read() -> None:
    found = read(kit.real(NAME, alpn=("h2", "http/1.1")))
    assert isinstance(found, Hello)
    assert (found.name, found.ech, found.alpn) == (NAME, False, (b"h2", b"http/1.1"))
    assert 0x0304 in found.versions


def test_real_hello_of_tls_1_2_is_read() -> None:
    assert read(kit.real(NAME, newest=ssl.TLSVersion.TLSv1_2)) == Hello(NAME, ech=False)


def test_real_hello_without_name_is_read() -> None:
    found = read(kit.real(None))
    assert isinstance(found, Hello)
    assert found.name is None


def test_hello_without_extensions_has_no_name() -> None:
    bare = kit.body()[:-2]
    assert read(kit.record(kit.message(bare))) == Hello(None, ech=False)
    assert read(kit.record(kit.message(kit.body()))) == Hello(None, ech=False)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("API.Example.COM", NAME),
        ("api.example.com.", NAME),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("_x.a-b.example", "_x.a-b.example"),
        ("localhost", "localhost"),
    ],
)
def test_name_is_compared_in_one_spelling(written: str, expected: str) -> None:
    found = read(kit.hello(written))
    assert isinstance(found, Hello)
    assert found.name == expected


@pytest.mark.parametrize(
    "name",
    [
        b"", b".", b"..", b"api.example.com..", b".api.example.com", b"api..example.com", b"api.example.com\0",
        b"evil.org\0.example.com", b"b\xc3\xbccher.example", b"\xff.example.com", b"api example.com",
        b"api.example.com\n", b"api.example.com:443", b"a/b.example.com",
        b"*.example.com", b"203.0.113.5", b"[::1]", b"::1", b"0x7f000001", b"a.0x1", b"2130706433", b"-a.example.com",
        b"a-.example.com", b"a" * 64 + b".example.com", b"a." * 130 + b"com",
    ],
)  # fmt: skip
def test_what_is_no_host_name_is_malformed(name: bytes) -> None:
    assert read(kit.record(kit.message(kit.body(kit.server_name(name))))) == "malformed"


def test_name_has_one_place() -> None:
    one = kit.server_name(NAME.encode())
    assert read(kit.record(kit.message(kit.body(one, one)))) == "malformed"
    entry = b"\0" + kit.vector(2, NAME.encode())
    for listed in (b"", entry + entry, entry + b"\0" + kit.vector(2, b"b.org"), entry + b"\x01\0\0", entry + b"\0"):
        assert read(kit.record(kit.message(kit.body(kit.extension(0, kit.vector(2, listed)))))) == "malformed"
    assert read(kit.record(kit.message(kit.body(kit.extension(0, kit.vector(2, entry) + b"\0"))))) == "malformed"
    assert read(kit.record(kit.message(kit.body(kit.extension(0, b""))))) == "malformed"
    assert read(kit.record(kit.message(kit.body(kit.server_name(NAME.encode(), kind=1))))) == "malformed"


@pytest.mark.parametrize("kind", [0xFE0D, 0xFE08, 0xFE0A, 0xFFCE, 0xFF02, 0xFF03, 0xFD00])
def test_encrypted_hello_is_seen_whatever_its_draft(kind: int) -> None:
    found = read(named(kit.extension(kind, b"\0" * 40)))
    assert isinstance(found, Hello)
    assert found.ech


def test_what_is_not_known_is_passed_over() -> None:
    found = read(named(kit.extension(kit.GREASE, b""), kit.extension(0x1A1A, b"\0")))
    assert found == Hello(NAME, ech=False)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n", b"SSH-2.0-x\r\n", b"\0", b"\x80\x2e\x01\x03\x01", b"\x16\x02", b"\x16\x04\x01",
        b"\x17\x03\x03", b"\x18", kit.record(b"\x01\x70", kind=21) + kit.hello(), kit.record(b"\x01", kind=20),
    ],
)  # fmt: skip
def test_what_does_not_begin_as_tls_is_told_at_once(data: bytes) -> None:
    assert read(data) == "not_tls"


@pytest.mark.parametrize(
    "data",
    [
        kit.record(b""),
        kit.record(kit.message(kit.body())[:9]) + kit.record(b""),
        kit.record(kit.message(kit.body())[:9]) + kit.record(b"\x01\x70", kind=21),
        kit.record(kit.message(kit.body())[:9]) + kit.record(b"x", kind=23),
        kit.record(kit.message(kit.body())[:9]) + b"GET /",
        kit.record(kit.message(kit.body(), kind=2)),
        kit.record(kit.message(kit.body(), kind=0)),
        kit.record(kit.message(kit.body()) + kit.message(kit.body())),
        kit.record(kit.message(kit.body()) + b"\0"),
        kit.record(kit.message(kit.body(version=0x0300))),
        kit.record(kit.message(kit.body(version=0x0304))),
        kit.record(kit.message(kit.body(session=b"s" * 33))),
        kit.record(kit.message(kit.body(suites=b""))),
        kit.record(kit.message(kit.body(suites=b"\x13\x01\x13"))),
        kit.record(kit.message(kit.body(compression=b""))),
        kit.record(kit.message(kit.body() + b"\0")),
        kit.record(kit.message(kit.body()[:-1])),
        kit.record(kit.message(kit.body(kit.extension(5, b"x") + b"\0"))),
        kit.record(kit.message(kit.body(b"\0\x05\0\x09x"))),
        kit.record(kit.message(kit.body(kit.extension(kit.GREASE, b""), kit.extension(kit.GREASE, b"")))),
        kit.record(kit.message(kit.body(kit.extension(16, b"\0\0")))),
        kit.record(kit.message(kit.body(kit.extension(16, kit.vector(2, b"\0"))))),
        kit.record(kit.message(kit.body(kit.extension(43, b"\x03\x03\x04\x03")))),
        kit.record(kit.message(b"")),
    ],
)
def test_what_two_readers_could_take_in_two_ways_is_malformed(data: bytes) -> None:
    assert read(data) == "malformed"


def test_hello_is_joined_over_records_and_segments() -> None:
    data = kit.records(kit.message(kit.body(kit.server_name(NAME.encode()))), (1, 1, 1, 2, 30, 5))
    reader = HelloReader()
    for byte in data[:-1]:
        assert reader.feed(bytes([byte])) is None
    assert reader.feed(data[-1:] + b"after") == Hello(NAME, ech=False)
    assert (reader.raw, reader.rest) == (data, b"after")


def padded(size: int) -> bytes:
    """A handshake message of exactly ``size`` bytes."""
    short = len(kit.message(kit.body(kit.server_name(NAME.encode()), kit.extension(21, b""))))
    return kit.message(kit.body(kit.server_name(NAME.encode()), kit.extension(21, b"\0" * (size - short))))


def test_longest_hello_is_read_and_one_byte_more_is_not() -> None:
    longest = padded(HELLO_BYTES)
    assert read(kit.record(longest)) == Hello(NAME, ech=False)
    assert read(kit.records(longest, [1] * HELLO_BYTES)) == Hello(NAME, ech=False)
    # Told by its header, and not only when all of it has come.
    assert read(kit.record(padded(HELLO_BYTES + 1)[:4])) == "hello_too_long"
    assert read(b"\x16\x03\x01\x40\x01") == "hello_too_long"
    assert read(kit.record(b"\x01\xff\xff\xff")) == "hello_too_long"


def test_second_hello_may_follow_what_server_throws_away() -> None:
    between = kit.record(b"\x01", kind=20) + kit.record(b"x" * 16640, kind=23, version=0x0303)
    assert read(between + named(), again=True) == Hello(NAME, ech=False)
    reader = HelloReader(again=True)
    assert reader.feed(between) is None
    assert reader.feed(named() + b"\x17") == Hello(NAME, ech=False)
    assert (reader.raw, reader.rest) == (between + named(), b"\x17")
    whole = kit.message(kit.body())
    assert read(kit.record(whole[:5]) + kit.record(b"x", kind=23), again=True) == "malformed"
    assert read(kit.record(b"x" * 16641, kind=23), again=True) == "malformed"
    flood = kit.record(b"x" * 16000, kind=23) * ((SKIPPED_BYTES + 6 * HELLO_BYTES) // 16000 + 1)
    assert read(flood, again=True) == "hello_too_long"


def answer(data: bytes) -> bool | str | None:
    """Whether the server asks again, the code of the refusal, or None when more is wanted."""
    try:
        return AnswerReader().feed(data)
    except Refused as refusal:
        return refusal.code


def test_answer_tells_whether_another_hello_follows() -> None:
    assert answer(kit.server_hello()) is False
    assert answer(kit.server_hello(retry=True)) is True
    reader = AnswerReader()
    *others, last = (bytes([byte]) for byte in kit.server_hello(retry=True))
    assert [reader.feed(byte) for byte in others] == [None] * len(others)
    assert reader.feed(last + kit.record(b"\x01", kind=20)) is True
    assert reader.rest == kit.record(b"\x01", kind=20)


def test_answer_may_begin_with_warning() -> None:
    warning = kit.record(b"\x01\x70", kind=21)
    assert answer(warning) is None
    assert answer(warning + kit.server_hello(retry=True)) is True
    assert answer(kit.record(b"\x02\x28", kind=21)) is None


@pytest.mark.parametrize(
    "data",
    [
        kit.record(b"x", kind=23), kit.record(b""), kit.record(kit.message(b"\x03\x03", kind=6)),
        kit.record(kit.server_hello(retry=True)[5:] + b"\x01"),
        kit.record(b"\x02\0") + kit.record(b"\x01\x70", kind=21),
        kit.record(b"\x01\x70", kind=21) * 10000,
    ],
)  # fmt: skip
def test_answer_none_is_refused(data: bytes) -> None:
    assert answer(data) in ("malformed", "not_tls")


def test_answer_not_tls_is_refused() -> None:
    assert answer(b"HTTP/1.1 400 Bad Request\r\n") == "not_tls"


def test_hello_as_answer_is_refused() -> None:
    assert answer(kit.hello()) == "malformed"
