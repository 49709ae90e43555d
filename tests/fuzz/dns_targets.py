"""DNS messages, as the agent and resolvers send them, and the requests of the gate's process to its broker."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import dns.edns
import dns.exception
import dns.message
import dns.rdatatype
import dns.rrset

from sandbox.network.dns import broker_wire, wire
from tests.fuzz.drive import Target

_NAME = "api.example.com"
_WORDS = (
    b"\xc0\x0c", b"\xc0\x00", b"\x00\x01\x00\x01", b"\x00\x1c\x00\x01", b"\x00\x41\x00\x01", b"\x00\x05\x00\x01",
    b"\x00\x00\x29", b"\x03www", b"\x07example", b"\x3f" + b"a" * 63, b"\x40", b"\x80", b"\x00", b"\xff\xff",
    b"\x84\x00", b"\x81\x80", b"\x00\x04\x00\x04", b"\x00\x05\x00\x0a", b"\x00\x06\x00\x10", b"\x00\x00\x00\x02",
)  # fmt: skip


def query(raw: bytes) -> str:
    """A question: dnspython reads the same, and every answer to it is one that dnspython takes for one."""
    read = wire.parse_query(raw)
    whole = dns.message.from_wire(raw, question_only=True)
    asked = whole.question[0]
    assert (read.id, asked.name, asked.rdtype, asked.rdclass) == (whole.id, read.name, read.type, read.klass)
    assert read.host is None or read.host == asked.name.to_text(omit_final_dot=True).lower()
    assert len(read.shown) <= 1024
    assert read.shown.isascii()
    assert read.shown.isprintable()
    for rcode in (wire.NOERROR, wire.NXDOMAIN, wire.SERVFAIL):
        answer = dns.message.from_wire(wire.reply(read, rcode, room=read.payload))
        assert whole.is_response(answer), answer
        assert answer.rcode() == rcode
    if read.host is not None and read.type in (wire.A, wire.AAAA):
        data = [bytes(range(4 if read.type == wire.A else 16))] * 40
        cut = wire.reply(read, 0, data=data, ttl=30, room=read.payload)
        assert len(cut) <= read.payload
        dns.message.from_wire(cut)
    return f"{read.host is not None} {read.type in wire.TYPES.values()} {read.klass == 1} {read.edns}"


_ASKED = {kind: wire.question(_NAME, kind, cased=b"aPi.exAMple.com") for kind in (wire.A, wire.AAAA, wire.HTTPS)}


def answer(raw: bytes) -> str:
    """A resolver's answer: what is taken from it, the agent's side can be told in a message that dnspython reads."""
    said = []
    for kind, asked in _ASKED.items():
        read = wire.parse_answer(raw, 0x0101, asked, _NAME, kind)
        said.append("other" if read is None else _told(read, kind))
    return " ".join(said)


def _told(read: wire.Answer, kind: int) -> str:
    assert len(read.addresses) + len(read.services) <= wire.RECORDS
    size = {wire.A: 4, wire.AAAA: 16}.get(kind)
    assert all(len(one) == size for one in read.addresses)
    assert read.ttl is None or 0 <= read.ttl < 1 << 31
    data = [*read.addresses, *(one.data(one.hints[:1]) for one in read.services)]
    made = wire.parse_query(wire.upstream_query(7, wire.question(_NAME, kind)))
    told = dns.message.from_wire(wire.reply(made, 0, data=data, ttl=30))
    for rrset in told.answer:
        for rdata in rrset:
            # No ECH, in any kind of record.
            assert 5 not in getattr(rdata, "params", {})
    return f"{read.rcode} {read.truncated} {read.negative} {bool(read.addresses)} {len(read.services)}"


def request(raw: bytes) -> str:
    """The patterns and addresses of an ADD: what is read is what would be written."""
    if len(raw) < broker_wire.HEADER.size:
        raise ValueError("short")
    _, ident, ttl, patterns, count = broker_wire.HEADER.unpack_from(raw)
    named = broker_wire.patterns_of(raw[broker_wire.HEADER.size :], patterns)
    packed = None if named is None else broker_wire.addresses_of(named[1], count)
    if named is None or packed is None:
        raise ValueError("not of its form")
    assert broker_wire.add_request(ident, ttl, named[0], packed)[1:] == raw[1:]
    return f"{min(patterns, 2)} {min(count, 2)}"


def _queries() -> Sequence[bytes]:
    made = [dns.message.make_query(_NAME, kind, id=1) for kind in ("A", "AAAA", "HTTPS", "TXT")]
    made.append(dns.message.make_query(_NAME, "A", use_edns=0, payload=1400, id=2))
    made[-1].use_edns(0, options=[dns.edns.GenericOption(dns.edns.OptionType.COOKIE, b"12345678")])
    return [one.to_wire() for one in made]


_RECORDS = {
    "A": ([("A", ["93.184.216.34", "10.0.0.1"])], [("CNAME", ["b.example."]), ("A", ["1.2.3.4"])]),
    "AAAA": ([("AAAA", ["2606:4700::1111", "::1"])], [("SOA", ["a. b. 1 2 3 4 5"])]),
    "HTTPS": (
        [("HTTPS", ['1 . alpn="h2" ipv4hint=1.2.3.4 ech="AAj+DQAEAAAAAA==" ipv6hint=2606:4700::1111', "0 x.example."])],
        [("HTTPS", ['2 b.example. mandatory=alpn alpn="h3" port=8443'])],
    ),
}


def _answers() -> Sequence[bytes]:
    found = []
    for kind, cases in _RECORDS.items():
        for records in cases:
            made = dns.message.from_wire(wire.upstream_query(0x0101, _ASKED[wire.TYPES[kind]]))
            response = dns.message.make_response(made)
            owner = _NAME + "."
            for type_, texts in records:
                response.answer.append(dns.rrset.from_text_list(owner, 300, "IN", type_, texts))
                owner = texts[0] if type_ == "CNAME" else owner
            found.append(response.to_wire())
    found.append(found[0][:3] + b"\x83" + found[0][4:])
    return found


def _requests() -> Sequence[bytes]:
    made = [broker_wire.add_request(1, 300, [0, 5], [b"\1\2\3\4", b"\1" * 16]), broker_wire.add_request(2, 30, [], [])]
    return [*made, broker_wire.tcp_request(3, 1)]


_UNREADABLE = (wire.MalformedError,)
TARGETS: tuple[Target, ...] = (
    Target("dns query", query, _queries, _WORDS, _UNREADABLE),
    Target("dns answer", answer, _answers, _WORDS, _UNREADABLE),
    Target("broker request", request, _requests, (b"\0\4", b"\0\x10", b"\0\0"), (ValueError, struct.error), share=2),
)
