"""DNS messages, one trick a case; dnspython writes what the gate reads and reads what it writes."""

from __future__ import annotations

import struct
from collections.abc import Callable

import dns.message
import dns.name
import dns.rcode
import dns.rrset
import pytest

from sandbox.network.dns import wire as dns_wire
from sandbox.network.dns.wire import FORMERR, NOTIMP, MalformedError

NAME = "api.example.com"


def query(name: str = NAME, kind: str = "A") -> bytes:
    """A plain question."""
    return dns.message.make_query(name, kind, id=0x1234).to_wire()


def answered(*records: tuple[str, str, str], rcode: int = 0, kind: int = dns_wire.A, soa: bool = False) -> bytes:
    """An answer to (0x1234, NAME, ``kind``) with (owner, type, text)."""
    asked = dns.message.from_wire(dns_wire.upstream_query(0x1234, dns_wire.question(NAME, kind)))
    made = dns.message.make_response(asked)
    made.set_rcode(dns.rcode.Rcode(rcode))
    for owner, type_, text in records:
        made.answer.append(dns.rrset.from_text(owner, 300, "IN", type_, text))
    if soa:
        made.authority.append(dns.rrset.from_text("com.", 60, "IN", "SOA", "a. b. 1 2 3 4 5"))
    return made.to_wire()


def read(wire: bytes, kind: int = dns_wire.A) -> dns_wire.Answer | None:
    """As the gate reads it."""
    return dns_wire.parse_answer(wire, 0x1234, dns_wire.question(NAME, kind), NAME, kind)


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("api.example.com.", NAME),
        ("API.Example.Com.", NAME),
        ("xn--bcher-kva.example.", "xn--bcher-kva.example"),
        ("_dmarc.example.com.", "_dmarc.example.com"),
        (".", None),
        ("1.2.3.4.", None),
        ("example.0x7f.", None),
        ("*.example.com.", None),
        ("a\\.b.example.com.", None),
        ("a\\000b.example.com.", None),
        ("b\\252cher.example.", None),
        ("-a.example.com.", None),
        ("a b.example.com.", None),
    ],
)
def test_name_is_host_or_it_is_none(name: str, host: str | None) -> None:
    wire = dns.name.from_text(name).to_wire()
    assert wire is not None
    found = dns_wire.parse_query(query()[:12] + wire + b"\0\1\0\1")
    assert found.host == host
    assert found.shown.isprintable()


@pytest.mark.parametrize(
    ("bent", "rcode"),
    [
        (lambda wire: wire[:11], None),
        (lambda wire: wire[:2] + b"\x81" + wire[3:], None),  # an answer
        (lambda wire: wire[:2] + b"\x29" + wire[3:], NOTIMP),  # UPDATE
        (lambda wire: wire + b"\0", FORMERR),
        (lambda wire: wire[:-1], FORMERR),
        (lambda wire: wire[:4] + struct.pack("!4H", 0, 0, 0, 0), FORMERR),
        (lambda wire: wire[:4] + struct.pack("!4H", 2, 0, 0, 0) + wire[12:] * 2, FORMERR),
        (lambda wire: wire[:4] + struct.pack("!4H", 1, 1, 0, 0) + wire[12:], FORMERR),
        (lambda wire: wire[:4] + struct.pack("!4H", 1, 0, 1, 0) + wire[12:], FORMERR),
        (lambda wire: wire[:4] + struct.pack("!4H", 1, 0, 0, 2) + wire[12:], FORMERR),
        (lambda wire: wire[:12] + b"\xc0\x0c\0\1\0\1", FORMERR),  # points to itself
        (lambda wire: wire[:12] + b"\x03api\xc0\x04\0\1\0\1", FORMERR),  # points into the header
        (lambda wire: wire[:12] + b"\x41" + b"a" * 65 + b"\0\0\1\0\1", FORMERR),
        (lambda wire: wire[:12] + (b"\x3f" + b"a" * 63) * 4 + b"\0\0\1\0\1", FORMERR),  # 257 bytes
        (lambda wire: wire + b"\0" * 600, FORMERR),
        (lambda wire: wire[:10] + b"\0\1" + wire[12:] + b"\0\0\1\0\1\0\0\0\0\0\0", FORMERR),  # a record, no OPT
        (lambda wire: wire[:10] + b"\0\1" + wire[12:] + b"\1a\0\0\x29\4\0\0\0\0\0\0\0", FORMERR),  # OPT with a name
    ],
)
def test_what_is_no_question(bent: Callable[[bytes], bytes], rcode: int | None) -> None:
    dns_wire.parse_query(query())
    with pytest.raises(MalformedError) as error:
        dns_wire.parse_query(bent(query()))
    assert error.value.rcode == rcode
    if rcode is not None:
        assert dns.message.from_wire(dns_wire.refusal(bent(query()), rcode), ignore_trailing=True).rcode() == rcode


@pytest.mark.parametrize(("said", "taken"), [(0, 512), (512, 512), (1000, 1000), (4096, 1232), (65535, 1232)])
def test_size_that_asker_takes(said: int, taken: int) -> None:
    wire = dns.message.make_query(NAME, "A", use_edns=0, payload=said).to_wire()
    assert dns_wire.parse_query(wire).payload == taken


def test_question_is_built_from_name_alone() -> None:
    made = dns.message.from_wire(
        dns_wire.upstream_query(7, dns_wire.question(NAME, dns_wire.AAAA, cased=b"API.example.CoM"))
    )
    assert made.question[0].to_text() == "API.example.CoM. IN AAAA"
    assert (made.id, made.edns, made.payload, made.options) == (7, 0, 1232, ())


def test_addresses_are_read_through_aliases() -> None:
    found = read(answered((f"{NAME}.", "CNAME", "b.net."), ("b.net.", "CNAME", "C.net."), ("c.net.", "A", "1.2.3.4")))
    assert found is not None
    assert (found.addresses, found.last, found.ttl, found.negative) == ((b"\1\2\3\4",), "c.net", 300, False)


def test_what_is_not_about_name_is_left() -> None:
    found = read(answered(("evil.net.", "A", "1.2.3.4"), (f"{NAME}.", "AAAA", "2606:4700::1")))
    assert found is not None
    assert (found.addresses, found.negative) == ((), True)


@pytest.mark.parametrize(
    ("wire", "negative"),
    [
        (answered(rcode=3, soa=True), True),
        (answered(soa=True), True),
        (answered((f"{NAME}.", "CNAME", "b.net."), soa=True), True),
        (answered((f"{NAME}.", "CNAME", "b.net.")), False),
        (answered((f"{NAME}.", "A", "1.2.3.4")), False),
    ],
)
def test_answer_without_records_is_one_or_leads_on(wire: bytes, *, negative: bool) -> None:
    found = read(wire)
    assert found is not None
    assert found.negative is negative


@pytest.mark.parametrize(
    "bent",
    [
        lambda wire: b"\x43\x21" + wire[2:],  # another id
        lambda wire: wire[:2] + b"\x01" + wire[3:],  # a question
        lambda wire: wire[:12] + wire[12:].replace(b"api", b"Api", 1),  # another case
        lambda wire: wire[:12] + wire[12:].replace(b"\0\1\0\1", b"\0\x1c\0\1", 1),  # another type
        lambda wire: wire[:6],
        lambda wire: b"",
    ],
)
def test_what_is_no_answer_to_question(bent: Callable[[bytes], bytes]) -> None:
    wire = answered((f"{NAME}.", "A", "1.2.3.4"))
    assert read(wire) is not None
    assert read(bent(wire)) is None


@pytest.mark.parametrize(
    "wire",
    [
        answered((f"{NAME}.", "A", "1.2.3.4"))[:-12],
        answered((f"{NAME}.", "CNAME", f"{NAME}.")),
        answered((f"{NAME}.", "CNAME", "b.net."), ("b.net.", "CNAME", f"{NAME}.")),
        answered((f"{NAME}.", "CNAME", "a\\.b.net.")),
        answered((f"{NAME}.", "A", "1.2.3.4"))[:6] + b"\xff\xff" + answered((f"{NAME}.", "A", "1.2.3.4"))[8:],
    ],
)
def test_answer_that_cannot_be_read(wire: bytes) -> None:
    with pytest.raises(MalformedError):
        read(wire)


def test_answer_with_truncated_tail_is_truncated() -> None:
    wire = answered((f"{NAME}.", "A", "1.2.3.4"))
    found = read(wire[:2] + b"\x83" + wire[3:-3])
    assert found is not None
    assert found.truncated


def test_failure_may_come_without_question() -> None:
    found = read(b"\x12\x34\x80\x05" + b"\0" * 8)
    assert found is not None
    assert found.rcode == 5
    assert read(b"\x12\x34\x80\x00" + b"\0" * 8) is None


def services(*texts: str) -> list[str]:
    """HTTPS records as the agent gets them, with all their hints."""
    asked = dns_wire.question(NAME, dns_wire.HTTPS)
    wire = answered(*((f"{NAME}.", "HTTPS", text) for text in texts), kind=dns_wire.HTTPS)
    found = dns_wire.parse_answer(wire, 0x1234, asked, NAME, dns_wire.HTTPS)
    assert found is not None
    told = dns_wire.reply(
        dns_wire.parse_query(query(NAME, "HTTPS")), 0, data=[one.data(one.hints) for one in found.services], ttl=60
    )
    return [rdata.to_text() for rrset in dns.message.from_wire(told).answer for rdata in rrset]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ('1 . alpn="h2,h3" port=8443', ['1 . alpn="h2,h3" port="8443"']),
        ('1 . alpn="h2" ech="AAj+DQAEAAAAAA=="', ['1 . alpn="h2"']),
        ('1 . mandatory=alpn alpn="h2"', ['1 . mandatory="alpn" alpn="h2"']),
        ('1 . mandatory=ech ech="AAj+DQAEAAAAAA=="', []),
        ("1 . mandatory=ipv4hint ipv4hint=1.2.3.4", []),
        ("1 . ipv4hint=1.2.3.4 ipv6hint=2606:4700::1", ['1 . ipv4hint="1.2.3.4" ipv6hint="2606:4700::1"']),
        ('1 . alpn="h2" dohpath="/q{?dns}" key65400="secret"', ['1 . alpn="h2"']),
        ("0 b.example.", []),
        ("1 a\\.b.example.", []),
        ("1 B.Example.", ["1 B.Example."]),
    ],
)
def test_https_record_keeps_what_is_known_and_never_ech(given: str, kept: list[str]) -> None:
    assert services(given) == kept


def test_answer_that_does_not_fit_is_cut_whole() -> None:
    asked = dns_wire.parse_query(query())
    data = [bytes([1, 2, 3, n]) for n in range(32)]
    whole = dns.message.from_wire(dns_wire.reply(asked, 0, data=data, ttl=60))
    assert len(whole.answer[0]) == 32
    cut = dns.message.from_wire(dns_wire.reply(asked, 0, data=data, ttl=60, room=512))
    assert cut.answer == []
    assert cut.flags & 0x0200
