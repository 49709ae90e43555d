"""Helpers for the network probes: marks, DNS questions, ClientHellos and exchanges.

A probe sends its mark, `mk-NAME-km`, in all its traffic. The tests listen on every link behind the gateway. A mark that
they see there got out, even if the probe reports that it was blocked. Every server of the test world answers `reached`.
"""

from __future__ import annotations

import os
import socket
import struct

from harness import Blocked

SECONDS = 3.0  # to wait for an answer; what is refused is refused at once
REACHED = b"reached"

# INVARIANT: tests/kernel/hostile_world.py gives these their meaning.
RESOLVERS = ("1.1.1.1", "8.8.8.8")  # others than the machine's own
RESOLVER6 = "2606:4700:4700::1111"
PUBLIC, PUBLIC6 = "9.9.9.10", "2620:fe::10"  # granted by no entry
API, API_ADDRESS = "api.example.com", "93.184.216.34"  # granted for tls
WILD = "wild.example.com"  # *.wild.example.com is granted for tls
SERVICE, SERVICE_PORT, SERVICE_UDP_PORT = "203.0.113.5", 5432, 123  # granted by its address
PRIVATE, METADATA = "10.8.8.8", "169.254.169.254"
GATEWAY, GATEWAY6 = "192.0.0.1", "fd00:c0:0:1::1"
AGENT, AGENT6 = "192.0.0.2", "fd00:c0:0:1::2"
AGENT_MAC, GATEWAY_MAC = bytes.fromhex("02c000000002"), bytes.fromhex("02c000000001")
HOST = "198.19.0.1"  # the supervisor's end of every run's uplink

A, NS, CNAME, NULL, MX, TXT, AAAA, SRV, HTTPS, AXFR, ANY = 1, 2, 5, 10, 15, 16, 28, 33, 65, 252, 255


def mark(name: str) -> bytes:
    """Return the mark that the observers search for, as bytes of a legal DNS label."""
    return b"mk-" + name.replace("_", "-").encode() + b"-km"


def label(name: str) -> str:
    """Return `mark` as text."""
    return mark(name).decode()


def family(address: str) -> socket.AddressFamily:
    """Return the address family of a literal address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def tcp(name: str, address: str, port: int, *, first: bytes | None = None, pieces: int = 1) -> str:
    """Connect, send the mark (or `first`, in `pieces` segments) and wait for the server's answer.

    Raises:
        OSError: the connection was refused or cut.
        Blocked: the connection was made and no answer came.
    """
    with socket.socket(family(address), socket.SOCK_STREAM) as made:
        made.settimeout(SECONDS)
        made.connect((address, port))
        return talk(made, mark(name) if first is None else first, pieces=pieces)


def talk(made: socket.socket, first: bytes, *, pieces: int = 1) -> str:
    """Send `first` and read until `reached` arrives."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    size = max(1, -(-len(first) // pieces))
    for start in range(0, len(first), size):
        made.sendall(first[start : start + size])
    heard = b""
    while REACHED not in heard:
        try:
            more = made.recv(4096)
        except TimeoutError:
            raise Blocked("connected, and nobody answered") from None
        if not more:
            raise Blocked("connected, and was cut off")
        heard = heard[-16:] + more
    return f"{made.getpeername()[0]} answered"


def udp(name: str, address: str, port: int, payload: bytes | None = None) -> str:
    """Send a datagram with the mark and have it answered.

    Raises:
        OSError: the network refused.
        Blocked: no answer.
    """
    with socket.socket(family(address), socket.SOCK_DGRAM) as made:
        made.connect((address, port))
        made.send(mark(name) if payload is None else payload)
        made.settimeout(SECONDS)
        try:
            return f"{address} answered {len(made.recv(4096))} bytes"
        except TimeoutError:
            raise Blocked("no answer") from None


def tell(name: str, address: str, port: int, payload: bytes | None = None) -> str:
    """Send a datagram, to a broadcast address too, and do not wait for an answer.

    Raises:
        OSError: the network refused.
        Blocked: the datagram was sent; only a listener in the gateway knows if it arrived.
    """
    with socket.socket(family(address), socket.SOCK_DGRAM) as made:
        if family(address) == socket.AF_INET:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        made.connect((address, port))
        made.send(mark(name) if payload is None else payload)
    raise Blocked("sent, and only an ear can tell")


def encoded(name: str) -> bytes:
    """Encode a name in DNS wire format."""
    return b"".join(bytes([len(part)]) + part.encode() for part in name.split(".") if part) + b"\0"


def question(name: str, kind: int = A, *, kclass: int = 1, flags: int = 0x0100) -> bytes:
    """Build a DNS message with one question."""
    return os.urandom(2) + struct.pack("!HHHHH", flags, 1, 0, 0, 0) + encoded(name) + struct.pack("!HH", kind, kclass)


def resolver() -> str:
    """The resolver that this agent was given.

    Raises:
        Blocked: it was given none.
    """
    try:
        with open("/etc/resolv.conf", encoding="ascii") as file:
            for line in file:
                if line.startswith("nameserver "):
                    return line.split()[1]
    except OSError:
        pass
    raise Blocked("no resolver")


def ask(message: bytes, *, server: str | None = None, stream: bool = False) -> bytes:
    """The answer to a DNS message.

    Raises:
        OSError, Blocked: there is none.
    """
    where = (server or resolver(), 53)
    kind = socket.SOCK_STREAM if stream else socket.SOCK_DGRAM
    with socket.socket(family(where[0]), kind) as made:
        made.settimeout(SECONDS)
        try:
            made.connect(where)
            made.sendall(struct.pack("!H", len(message)) + message if stream else message)
            return made.recv(65535)[2:] if stream else made.recv(65535)
        except TimeoutError:
            raise Blocked("no answer") from None


def resolved(message: bytes, *, server: str | None = None, stream: bool = False) -> str:
    """Ask, and count the records of the answer.

    Raises:
        OSError: none came.
        Blocked: it was an error, or empty.
    """
    answer = ask(message, server=server, stream=stream)
    if len(answer) < 12:
        raise Blocked(f"answered {len(answer)} bytes")
    _, flags, _, count = struct.unpack_from("!HHHH", answer)
    if flags & 15 or not count:
        raise Blocked(f"answered with code {flags & 15} and {count} records")
    return f"answered {count} records"


def address_of(name: str, kind: int = A) -> str:
    """The first address of a name, by the agent's resolver.

    Raises:
        OSError, Blocked: there is none.
    """
    answer = ask(question(name, kind))
    size = 4 if kind == A else 16
    # The last record of the answer holds the address (ours have no additional section of this length).
    place = answer.find(struct.pack("!HH", kind, 1), 12 + len(encoded(name)) + 4)
    if struct.unpack_from("!H", answer, 2)[0] & 15 or place < 0:
        raise Blocked(f"{name} has no address")
    data = answer[place + 10 : place + 10 + size]
    return socket.inet_ntop(socket.AF_INET if kind == A else socket.AF_INET6, data)


def granted_address() -> str:
    """Where the granted name leads; asking for it opens the way, as any client would.

    Without a resolver of its own (network off) the address is known anyway.
    """
    try:
        return address_of(API)
    except (OSError, Blocked):
        return API_ADDRESS


def extension(kind: int, data: bytes) -> bytes:
    """One extension of a ClientHello."""
    return struct.pack("!HH", kind, len(data)) + data


def server_name(*names: str) -> bytes:
    """The server_name extension (RFC 6066) with these names."""
    entries = b"".join(b"\0" + struct.pack("!H", len(name)) + name.encode("latin-1") for name in names)
    return extension(0, struct.pack("!H", len(entries)) + entries)


def hello(name: str, *extensions: bytes) -> bytes:
    """A handshake message: a ClientHello whose session id and padding carry the mark."""
    carried = mark(name)
    session = carried[:32].ljust(32, b"-")
    versions = extension(43, b"\x02\x03\x04")
    last = versions + b"".join(extensions) + extension(0x3A3A, carried)
    body = b"\x03\x03" + os.urandom(32) + bytes([32]) + session + b"\0\x02\x13\x01" + b"\x01\0"
    body += struct.pack("!H", len(last)) + last
    return b"\x01" + len(body).to_bytes(3, "big") + body


def records(handshake: bytes, *, size: int = 1 << 14) -> bytes:
    """TLS records of at most `size` bytes."""
    pieces = [handshake[start : start + size] for start in range(0, len(handshake), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack("!H", len(piece)) + piece for piece in pieces)
