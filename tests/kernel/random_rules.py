"""Rules at random, each packet sent under the real nft and judged by both readings of the same text.

Run in a network namespace of its own: ``unshare --net python -m tests.kernel.random_rules SEED TABLES``. Prints
a JSON document: how many packets, and those whose three answers are not one.
"""

from __future__ import annotations

import ipaddress
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator

from policy import errors
from policy.decompile.network import nft, packets
from policy.decompile.network.flows import Flow, PacketKind

SETS = """\
\tset s1 {
\t\ttype ipv4_addr
\t\tflags interval
\t\telements = { 127.0.0.0-127.0.0.9, 127.0.0.10-127.0.0.12, 127.0.0.20 }
\t}
\tset s2 {
\t\ttype ipv4_addr
\t\tflags interval
\t\telements = { 127.0.0.5-255.255.255.255 }
\t}
\tset s3 {
\t\ttype ipv4_addr
\t\tflags timeout
\t\tsize 1024
\t}
\tset s6 {
\t\ttype ipv6_addr
\t\tflags interval
\t\telements = { ::-::1, ffff::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff }
\t}
\tcounter c1 {
\t}
"""
MATCHES = [
    *("ip daddr @s1", "ip daddr @s2", "ip daddr @s3", "ip6 daddr @s6"),
    *("udp dport { 80, 90-100 }", "udp dport { 0-79, 95-65535 }", "tcp dport { 80 }"),
    *("meta l4proto udp", "meta l4proto tcp", "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert }"),
    *('oifname "lo"', 'oifname "eth9"', "meta skuid 0", "meta skuid 7"),
    *("ct state established,related", "ct status dnat"),
]
VERDICTS = ["accept", "drop", "return", "reject with tcp reset", "reject with icmpx port-unreachable"]
CHAINS = ("output", "aa", "bb", "cc")
HELD = ("127.0.0.4", "127.0.0.13")  # in the set that is filled while the rules stand
PLACES = ("127.0.0.1", *HELD, "127.0.0.5", "127.0.0.9", "127.0.0.10", "127.0.0.20", "127.255.255.254", "::1")
PORTS = (1, 79, 80, 81, 90, 94, 95, 100, 101, 65535)


def rule(rng: random.Random, later: tuple[str, ...]) -> str:
    """One rule that the reader understands, calling only chains that come later."""
    calls = [f"{verb} {chain}" for verb in ("jump", "goto") for chain in later]
    while True:
        matches = rng.sample(MATCHES, rng.choice([0, 0, 1, 1, 1, 2, 2, 3]))
        counted = ['counter name "c1"'] if rng.random() < 0.2 else []
        text = " ".join([*matches, *counted, rng.choice([*VERDICTS, *calls])])
        try:
            nft.rule(text, 1)
        except errors.ArtefactError:
            continue
        return text


def table(rng: random.Random) -> str:
    """A whole text."""
    chains = []
    for at, name in enumerate(CHAINS):
        lines = [rule(rng, CHAINS[at + 1 :]) for _ in range(rng.randrange(1, 5))]
        if name == "output":
            lines.insert(0, f"type filter hook output priority filter; policy {rng.choice(['accept', 'drop'])};")
        chains.append(f"\tchain {name} {{\n" + "".join(f"\t\t{line}\n" for line in lines) + "\t}\n")
    return f"{nft.TABLE}\n{SETS}{''.join(chains)}}}\n"


def loaded(text: str) -> bool:
    """Whether nft takes the rules; a contradiction such as IPv4 of ICMPv6 it does not."""
    subprocess.run(["/usr/sbin/nft", "flush", "ruleset"], check=True)
    if subprocess.run(["/usr/sbin/nft", "-f", "-"], input=text, text=True, capture_output=True).returncode:
        return False
    elements = ", ".join(f"{one} timeout 1h" for one in HELD)
    subprocess.run(["/usr/sbin/nft", "add", "element", "inet", "covenant", "s3", f"{{ {elements} }}"], check=True)
    return True


def sent(place: str, port: int) -> bool:
    """Whether the kernel lets a datagram out."""
    with socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.sendto(b"x", (place, port))
        except OSError:
            return False
    return True


def answers(text: str) -> Iterator[tuple[str, int, bool, bool, bool]]:
    """Place, port, and what the kernel, the reading packet by packet and the reading of all at once say."""
    rules = nft.parse(text.encode())
    flow = Flow.of(rules, PacketKind("output", "udp", oif="lo", uid=0))
    for place in PLACES:
        point = int(ipaddress.ip_address(place)) + (nft.BASE_V6 if ":" in place else 0)
        held = frozenset({"s3"} if place in HELD else ())
        static = (one.name for one in rules.sets.values() if any(a <= point <= b for a, b in one.spans))
        ports = flow.accepted(held.union(static))
        for port in PORTS:
            packet = packets.Packet(point, "udp", port, oif="lo", uid=0, held=held)
            said = packets.verdict(rules, "output", packet)[0] == "accept"
            yield place, port, sent(place, port), said, any(a <= port <= b for a, b in ports)


def main() -> None:
    """Print what was found."""
    rng = random.Random(int(sys.argv[1]))
    subprocess.run(["/usr/sbin/ip", "link", "set", "lo", "up"], check=True)
    count, passed, odd = 0, 0, []
    for _ in range(int(sys.argv[2])):
        text = table(rng)
        if not loaded(text):
            continue
        for place, port, real, each, at_once in answers(text):
            count, passed = count + 1, passed + real
            if not real == each == at_once:
                odd.append([text, place, port, real, each, at_once])
    print(json.dumps({"packets": count, "passed": passed, "odd": odd[:3]}))


if __name__ == "__main__":
    main()
