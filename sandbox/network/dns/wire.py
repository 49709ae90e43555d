"""DNS messages as the gate reads and writes them (RFC 1035, 6891, 9460): a small part of the protocol, strictly.

dnspython reads the names; it follows compression pointers safely. Only addresses, aliases and HTTPS records are parsed.
Every message that leaves the gate, to either side, is built here from its parts. Of the agent's bytes only the letters
of a granted name are passed on.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence

import dns.exception
import dns.name
from msgspec import Struct

from sandbox.network.dns import https_record
from sandbox.network.dns.https_record import Service

A, CNAME, SOA, AAAA, OPT, HTTPS = 1, 5, 6, 28, 41, 65
TYPES = {"A": A, "AAAA": AAAA, "HTTPS": HTTPS}
IN = 1
NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 2, 3, 4, 5
# What passes an Ethernet link unfragmented in either family (dnsflagday.net/2020).
PAYLOAD_BYTES = 1232
PLAIN_BYTES = 512  # without EDNS (RFC 1035)
# For a resolver that does not answer over TCP: fragments are better than no answer.
LARGE_BYTES = 4096
# A query is a header, one name of 255 bytes, and at most an OPT record.
QUERY_BYTES = 512
# Addresses or HTTPS records of one answer that are passed on.
RECORDS = 32
_RECORDS_READ = 256

_HEADER = struct.Struct("!HHHHHH")
_QUESTION = struct.Struct("!HH")
_RECORD = struct.Struct("!HHIH")
_PRIORITY = struct.Struct("!H")
_QR, _AA, _TC, _RD, _RA = 0x8000, 0x0400, 0x0200, 0x0100, 0x0080
_OPCODE, _RCODE = 0x7800, 0x000F
_TO_QUESTION = b"\xc0\x0c"

_LABEL = re.compile(rb"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(rb"[0-9]+|0x[0-9a-f]*")


class MalformedError(Exception):
    """Raised when the gate does not accept a message. ``rcode`` is the code of the answer, None for no answer."""

    def __init__(self, why: str, rcode: int | None = None) -> None:
        super().__init__(why)
        self.rcode = rcode


class Query(Struct, frozen=True):
    """Query of the agent. ``host`` is the name in lower case, None if it is no valid host name.

    ``question`` are its unchanged bytes, for the answer. ``payload`` is the agent's UDP payload size in bytes.
    """

    id: int
    flags: int
    name: dns.name.Name
    host: str | None
    type: int
    klass: int
    question: bytes
    edns: bool
    payload: int

    @property
    def shown(self) -> str:
        """The name for people: what is not plain ASCII is escaped."""
        return self.host or self.name.to_text(omit_final_dot=True)


class Answer(Struct, frozen=True):
    """Answer of a resolver about one name and type.

    ``last`` is the name at the end of its aliases. ``negative`` says that it is final, with or without records. ``ttl``
    is the least TTL of all followed records in seconds, None without any. ``negative_ttl`` is the time that the zone
    gives to the absence of a record, None if it says none.
    """

    rcode: int
    truncated: bool
    last: str
    addresses: tuple[bytes, ...]
    services: tuple[Service, ...]
    ttl: int | None
    negative: bool
    negative_ttl: int | None = None


class _Reader:
    """Reads a message from ``at``, up to ``end``; names may point back to anything before them."""

    def __init__(self, wire: bytes, at: int, end: int | None = None) -> None:
        self.wire, self.at, self.end = wire, at, len(wire) if end is None else end

    @property
    def left(self) -> int:
        return self.end - self.at

    def take(self, size: int) -> bytes:
        if not 0 <= size <= self.left:
            raise ValueError("a part is longer than the whole")
        self.at += size
        return self.wire[self.at - size : self.at]

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))

    def name(self) -> dns.name.Name:
        found, size = dns.name.from_wire(self.wire, self.at)
        self.take(size)
        return found


def host(name: dns.name.Name) -> str | None:
    """A name in lower case as grants write it; None when it is none that a grant could cover."""
    labels = [label.lower() for label in name.labels[:-1]]
    if not labels or not all(map(_LABEL.fullmatch, labels)) or _NUMBER.fullmatch(labels[-1]):
        return None
    return b".".join(labels).decode("ascii")


def parse_query(wire: bytes) -> Query:
    """The one question in ``wire``.

    Raises:
        MalformedError: it is not exactly a standard query with one question, and at most an OPT record.
    """
    if len(wire) < _HEADER.size or wire[2] & 0x80:
        raise MalformedError("no query")  # never answered: two servers could answer each other for ever
    ident, flags, questions, answers, authorities, additional = _HEADER.unpack_from(wire)
    if flags & _OPCODE:
        raise MalformedError("another operation", NOTIMP)
    if len(wire) > QUERY_BYTES or questions != 1 or answers or authorities or additional > 1:
        raise MalformedError("not one question", FORMERR)
    try:
        reader = _Reader(wire, _HEADER.size)
        name = reader.name()
        kind, klass = reader.unpack(_QUESTION)
        asked = wire[_HEADER.size : reader.at]
        if len(asked) != len(_uncompressed(name)) + _QUESTION.size:
            raise MalformedError("a question with a pointer", FORMERR)
        payload = _opt(reader) if additional else PLAIN_BYTES
        if reader.left:
            raise MalformedError("more than a question", FORMERR)
    except (dns.exception.DNSException, struct.error, ValueError) as e:
        raise MalformedError("unreadable", FORMERR) from e
    return Query(ident, flags, name, host(name), kind, klass, asked, bool(additional), payload)


def _opt(reader: _Reader) -> int:
    """Read the payload size from the OPT record. Its options are skipped and not passed on."""
    name = reader.name()
    kind, size, _, length = reader.unpack(_RECORD)
    reader.take(length)
    if kind != OPT or name.labels != (b"",):
        raise MalformedError("a record beside the question", FORMERR)
    return max(PLAIN_BYTES, min(size, PAYLOAD_BYTES))


def question(name: str, kind: int, *, cased: bytes | None = None) -> bytes:
    """The bytes of a question; ``cased`` are the name's letters in another case (draft-vixie-dnsext-dns0x20)."""
    text = cased or name.encode("ascii")
    return b"".join(bytes([len(label)]) + label for label in text.split(b".")) + b"\0" + _QUESTION.pack(kind, IN)


def upstream_query(ident: int, asked: bytes, *, payload: int = PAYLOAD_BYTES) -> bytes:
    """A query with the bytes of ``question``: recursion desired, EDNS without any option.

    ``payload`` is the size of the answers that are taken over UDP, 0 for a query without EDNS.
    """
    opt = b"\0" + _RECORD.pack(OPT, payload, 0, 0) if payload else b""
    return _HEADER.pack(ident, _RD, 1, 0, 0, 1 if opt else 0) + asked + opt


def parse_answer(wire: bytes, ident: int, asked: bytes, name: str, kind: int) -> Answer | None:
    """Parse the answer in ``wire`` to ``upstream_query(ident, asked)``. None if it answers another query.

    Raises:
        MalformedError: Raised when it answers that query and is malformed.
    """
    if len(wire) < _HEADER.size:
        return None
    got, flags, questions, answers, authorities, _ = _HEADER.unpack_from(wire)
    if got != ident or not flags & _QR or flags & _OPCODE:
        return None
    rcode, truncated = flags & _RCODE, bool(flags & _TC)
    if questions == 0 and rcode not in (NOERROR, NXDOMAIN):
        return Answer(rcode, truncated, name, (), (), None, False)  # some say no more than that they failed
    end = _HEADER.size + len(asked)
    if questions != 1 or wire[_HEADER.size : end] != asked:
        return None
    try:
        records = list(_records(_Reader(wire, end), answers, authorities))
    except (dns.exception.DNSException, struct.error, ValueError) as e:
        if not truncated:
            raise MalformedError("unreadable answer") from e
        records = []
    return _read(records, rcode, truncated=truncated, name=name, kind=kind)


class _Record(Struct, frozen=True):
    section: int
    owner: str
    type: int
    ttl: int
    value: bytes | str | Service


def _records(reader: _Reader, answers: int, authorities: int) -> Iterator[_Record]:
    """The records that mean something here, of the first two sections."""
    if answers + authorities > _RECORDS_READ:
        raise ValueError("too many records")
    for index in range(answers + authorities):
        owner = reader.name()
        kind, klass, ttl, length = reader.unpack(_RECORD)
        within = _Reader(reader.wire, reader.at, reader.at + length)
        reader.take(length)
        value = _value(within, kind)
        if value is not None and within.left:
            raise ValueError("a record is longer than it says")
        plain = host(owner)
        if klass == IN and value is not None and (plain is not None or kind == SOA):
            # RFC 2181, 8: a TTL with the highest bit set is 0.
            yield _Record(0 if index < answers else 1, plain or "", kind, ttl if ttl < 1 << 31 else 0, value)


def _value(reader: _Reader, kind: int) -> bytes | str | Service | None:
    if kind == A:
        return reader.take(4)
    if kind == AAAA:
        return reader.take(16)
    if kind == CNAME:
        return host(reader.name()) or ""
    if kind == HTTPS:
        return _service(reader)
    if kind == SOA:
        # The last of its fields is the TTL of what is not there (RFC 2308, 4).
        return reader.take(reader.left)[-4:]
    return None


def _read(records: Sequence[_Record], rcode: int, *, truncated: bool, name: str, kind: int) -> Answer:
    aliases = {r.owner: r for r in records if r.type == CNAME and r.section == 0}
    last, ttls, seen = name, [], {name}
    while last in aliases:
        ttls.append(aliases[last].ttl)
        last = str(aliases[last].value)
        if last in seen or not last:
            raise MalformedError("aliases that lead nowhere")
        seen.add(last)
    found = [r for r in records if r.section == 0 and r.owner == last and r.type == kind][:RECORDS]
    ttls += [r.ttl for r in found]
    # Without a record of that type, an SOA or NXDOMAIN says that there is none; without either the aliases lead out
    # of what this resolver looked up (RFC 2308, 2.2).
    negative = not found and (rcode == NXDOMAIN or last == name or any(r.type == SOA for r in records))
    absent = [
        min(r.ttl, int.from_bytes(r.value, "big")) for r in records if isinstance(r.value, bytes) and r.type == SOA
    ]
    return Answer(
        rcode,
        truncated,
        last,
        tuple(r.value for r in found if isinstance(r.value, bytes)),
        tuple(r.value for r in found if isinstance(r.value, Service)),
        min(ttls, default=None),
        negative,
        min(absent, default=None) if negative else None,
    )


def _service(reader: _Reader) -> Service | None:
    (priority,) = reader.unpack(_PRIORITY)
    target = reader.name()
    own = target.labels == (b"",)
    plain = "" if own else host(target)
    if plain is None:
        return None
    return https_record.read(priority, plain, _uncompressed(target), reader.take(reader.left))


def _uncompressed(name: dns.name.Name) -> bytes:
    return b"".join(bytes([len(label)]) + label for label in name.labels)


def reply(query: Query, rcode: int, *, data: Sequence[bytes] = (), ttl: int = 0, room: int = 65535) -> bytes:
    """Build the answer to the agent. ``data`` are records of the requested type and name.

    If it is longer than ``room`` bytes it becomes an empty answer with TC set, so the agent repeats the query over TCP
    (RFC 2181, 9).
    """
    records = b"".join(_TO_QUESTION + _RECORD.pack(query.type, IN, ttl, len(one)) + one for one in data)
    opt = b"\0" + _RECORD.pack(OPT, PAYLOAD_BYTES, 0, 0) if query.edns else b""
    flags = _QR | _RA | (query.flags & _RD) | rcode
    size = _HEADER.size + len(query.question) + len(records) + len(opt)
    count = len(data)
    if size > room:
        flags, count, records = flags | _TC, 0, b""
    return _HEADER.pack(query.id, flags, 1, count, 0, 1 if opt else 0) + query.question + records + opt


def refusal(wire: bytes, rcode: int) -> bytes:
    """An answer to what could not be read: its id, and no question."""
    flags = _QR | (int.from_bytes(wire[2:4], "big") & (_OPCODE | _RD)) | rcode
    return _HEADER.pack(int.from_bytes(wire[:2], "big"), flags, 0, 0, 0, 0)
