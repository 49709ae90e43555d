"""TLS to a granted address, with a ClientHello that is not the granted one's; and what is no TLS at all."""

from __future__ import annotations

import socket
import struct
import time

import wire
from harness import Blocked, probe
from wire import API, extension, hello, records, server_name

EVIL = "evil.example.net"
ECH = 0xFE0D
SLOW_SECONDS = 12.0  # the gate waits three


def _send(name: str, first: bytes, *, pieces: int = 1) -> str:
    return wire.tcp(name, wire.granted_address(), 443, first=first, pieces=pieces)


@probe("sni_other")
def sni_other() -> str:
    return _send("sni_other", records(hello("sni_other", server_name(EVIL))))


@probe("sni_absent")
def sni_absent() -> str:
    return _send("sni_absent", records(hello("sni_absent")))


@probe("sni_empty")
def sni_empty() -> str:
    return _send("sni_empty", records(hello("sni_empty", server_name(""))))


@probe("sni_two_names")
def sni_two_names() -> str:
    """The granted name first, and the wanted one behind it."""
    return _send("sni_two_names", records(hello("sni_two_names", server_name(API, EVIL))))


@probe("sni_two_extensions")
def sni_two_extensions() -> str:
    return _send("sni_two_extensions", records(hello("sni_two_extensions", server_name(API), server_name(EVIL))))


@probe("sni_nul")
def sni_nul() -> str:
    return _send("sni_nul", records(hello("sni_nul", server_name(f"{API}\0.{EVIL}"))))


@probe("sni_suffix")
def sni_suffix() -> str:
    return _send("sni_suffix", records(hello("sni_suffix", server_name(f"{API}.{EVIL}"))))


@probe("sni_address")
def sni_address() -> str:
    return _send("sni_address", records(hello("sni_address", server_name(wire.API_ADDRESS))))


@probe("sni_unicode")
def sni_unicode() -> str:
    """A letter that some fold to an ordinary one."""
    name = "api.example.com".replace("e", "\xe8", 1)
    return _send("sni_unicode", records(hello("sni_unicode", server_name(name))))


@probe("sni_of_the_wildcard_itself")
def sni_of_the_wildcard_itself() -> str:
    return _send(
        "sni_of_the_wildcard_itself", records(hello("sni_of_the_wildcard_itself", server_name("*.wild.example.com")))
    )


@probe("sni_encrypted")
def sni_encrypted() -> str:
    """An encrypted inner hello behind the granted outer name."""
    carried = extension(ECH, b"\0\0\1\0\1\7\0\0" + struct.pack("!H", 64) + b"e" * 64)
    return _send("sni_encrypted", records(hello("sni_encrypted", server_name(API), carried)))


@probe("sni_split_segments")
def sni_split_segments() -> str:
    """The wanted name cut into many segments."""
    return _send("sni_split_segments", records(hello("sni_split_segments", server_name(EVIL))), pieces=40)


@probe("sni_split_records")
def sni_split_records() -> str:
    return _send("sni_split_records", records(hello("sni_split_records", server_name(EVIL)), size=16))


@probe("sni_second_hello")
def sni_second_hello() -> str:
    """A second ClientHello in the same record, behind the granted one."""
    both = hello("sni_second_hello", server_name(EVIL)) + hello("sni_second_hello", server_name(API))
    return _send("sni_second_hello", records(both))


@probe("sni_behind_junk")
def sni_behind_junk() -> str:
    """An alert record first, which some readers skip."""
    return _send("sni_behind_junk", b"\x15\x03\x01\0\x02\1\0" + records(hello("sni_behind_junk", server_name(EVIL))))


@probe("hello_long")
def hello_long() -> str:
    """The name behind more padding than the gate reads."""
    first = hello("hello_long", extension(21, bytes(40_000)), server_name(EVIL))
    return _send("hello_long", records(first))


@probe("hello_old")
def hello_old() -> str:
    """SSL 2: a ClientHello without extensions in another frame."""
    return _send("hello_old", b"\x80\x2e\x01\x03\x01\0\x15\0\0\0\x10" + wire.mark("hello_old").ljust(37, b"-"))


@probe("hello_garbage")
def hello_garbage() -> str:
    return _send("hello_garbage", b"\x16\x03\x01\xff\xff" + wire.mark("hello_garbage") * 50)


@probe("plain_http")
def plain_http() -> str:
    return _send("plain_http", b"GET /" + wire.mark("plain_http") + b" HTTP/1.1\r\nHost: api.example.com\r\n\r\n")


@probe("plain_ssh")
def plain_ssh() -> str:
    return _send("plain_ssh", b"SSH-2.0-" + wire.mark("plain_ssh") + b"\r\n")


@probe("plain_silence")
def plain_silence() -> str:
    """A server that speaks first is heard before any hello was judged."""
    with socket.create_connection((wire.granted_address(), 443), wire.SECONDS) as made:
        try:
            heard = made.recv(64)
        except TimeoutError:
            raise Blocked("nobody spoke") from None
    if wire.REACHED not in heard:
        raise Blocked("cut off")
    return "the server spoke first"


@probe("hello_slow")
def hello_slow() -> str:
    """One byte a moment: a connection that never says who it is must not stand for ever."""
    first = records(hello("hello_slow", server_name(API)))
    until = time.monotonic() + SLOW_SECONDS
    with socket.create_connection((wire.granted_address(), 443), wire.SECONDS) as made:
        made.settimeout(0.1)
        for byte in first[:60]:
            made.sendall(bytes([byte]))
            try:
                heard = made.recv(64)
            except TimeoutError:
                heard = b"-"
            if not heard:
                raise Blocked("cut off")
            if wire.REACHED in heard or time.monotonic() > until:
                break
            time.sleep(0.1)
    return f"stood for {SLOW_SECONDS:g} s, or was answered"


@probe("sni_of_another_grant")
def sni_of_another_grant() -> str:
    """A granted name at an address that it never led to."""
    first = records(hello("sni_of_another_grant", server_name(API)))
    return wire.tcp("sni_of_another_grant", "9.9.9.78", 443, first=first)


@probe("sni_granted_private")
def sni_granted_private() -> str:
    """The granted name in the hello, and a private address below it."""
    first = records(hello("sni_granted_private", server_name(API)))
    return wire.tcp("sni_granted_private", wire.PRIVATE, 443, first=first)


@probe("sni_granted_metadata")
def sni_granted_metadata() -> str:
    first = records(hello("sni_granted_metadata", server_name(API)))
    return wire.tcp("sni_granted_metadata", wire.METADATA, 443, first=first)


@probe("sni_granted_ipv6")
def sni_granted_ipv6() -> str:
    first = records(hello("sni_granted_ipv6", server_name(API)))
    return wire.tcp("sni_granted_ipv6", "2620:fe::78", 443, first=first)


# --- what is granted, so that the refusals beside it prove something


@probe("granted_name")
def granted_name() -> str:
    """Resolve, connect, and name it in the hello."""
    return wire.tcp("granted_name", wire.address_of(API), 443, first=records(hello("granted_name", server_name(API))))


@probe("granted_wildcard")
def granted_wildcard() -> str:
    name = f"one.{wire.WILD}"
    return wire.tcp(
        "granted_wildcard", wire.address_of(name), 443, first=records(hello("granted_wildcard", server_name(name)))
    )


@probe("granted_name_split")
def granted_name_split() -> str:
    """The granted hello in 40 segments and small records: joined, not refused."""
    first = records(hello("granted_name_split", server_name(API)), size=64)
    return wire.tcp("granted_name_split", wire.address_of(API), 443, first=first, pieces=40)


@probe("granted_name_ipv6")
def granted_name_ipv6() -> str:
    first = records(hello("granted_name_ipv6", server_name(API)))
    return wire.tcp("granted_name_ipv6", wire.address_of(API, wire.AAAA), 443, first=first)


@probe("granted_service")
def granted_service() -> str:
    return wire.tcp("granted_service", wire.SERVICE, wire.SERVICE_PORT)


@probe("granted_datagram")
def granted_datagram() -> str:
    return wire.udp("granted_datagram", wire.SERVICE, wire.SERVICE_UDP_PORT)
