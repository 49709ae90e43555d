"""The first bytes of a TLS connection, from both sides: what is accepted has one meaning, however it is cut."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox.network.tls.client_hello import HELLO_BYTES, SKIPPED_BYTES, AnswerReader, HelloReader, Refused
from tests import hello_kit as kit
from tests.fuzz.drive import Target

_NAME = b"api.example.com"
_WORDS = (
    b"\x16\x03\x01", b"\x17\x03\x03", b"\x14\x03\x03\0\x01\x01", b"\x15\x03\x01\0\x02\x01\x70",
    b"\x01\0\0", b"\x02\0\0",
    b"\0\0", b"\xfe\x0d", b"\xff\xce", b"\x03\x03", b"\x03\x04", kit.server_name(_NAME), kit.RETRY_RANDOM, b"\0", b".",
    kit.extension(16, b"\0\x03\x02h2"), kit.extension(43, b"\x02\x03\x04"), _NAME, b"xn--", b"\xff\xff",
)  # fmt: skip


def hello(raw: bytes) -> str:
    """A hello: cut after every fifth byte it is the same one, and its name stands in its bytes."""
    reader, cut = HelloReader(), HelloReader()
    found = reader.feed(raw)
    again = next((one for at in range(0, len(raw), 5) if (one := cut.feed(raw[at : at + 5])) is not None), None)
    assert found == again
    if found is None:
        return "wants more"
    assert reader.raw + reader.rest == raw
    assert reader.raw == cut.raw
    assert len(reader.raw) <= 6 * HELLO_BYTES + SKIPPED_BYTES
    if found.name is not None:
        # Over several records a header may stand in the middle of it.
        joined = b"".join(_fragments(reader.raw))
        assert found.name.encode() in joined.lower()
        assert found.name.isascii()
        assert found.name == found.name.lower()
    return f"{found.name is not None} {found.ech} {len(found.alpn)} {len(found.versions)}"


def answer(raw: bytes) -> str:
    """A server's answer: cut after every byte it says the same."""
    said = AnswerReader().feed(raw)
    cut = AnswerReader()
    again = next((one for byte in raw if (one := cut.feed(bytes([byte]))) is not None), None)
    assert said == again
    return str(said)


def _fragments(raw: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at + 3 : at + 5])
        found.append(raw[at + 5 : at + 5 + size])
        at += 5 + size
    return found


def _hellos() -> Sequence[bytes]:
    whole = kit.message(kit.body(kit.server_name(_NAME), kit.extension(16, kit.vector(2, b"\x02h2"))))
    return (
        kit.real("api.example.com", alpn=("h2", "http/1.1")),
        kit.real(None),
        kit.hello("api.example.com.", kit.extension(kit.ECH, b"\0" * 8)),
        kit.records(whole, (3, 40, 9)),
    )


def _answers() -> Sequence[bytes]:
    warning = kit.record(b"\x01\x70", kind=21)
    return kit.server_hello(), kit.server_hello(retry=True) + kit.record(b"\x01", kind=20), warning + kit.server_hello()


TARGETS = (
    Target("client hello", hello, _hellos, _WORDS, refusals=(Refused,), share=8),
    Target("server answer", answer, _answers, _WORDS, refusals=(Refused,), share=3),
)
