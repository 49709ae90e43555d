"""The world that the network probes try to reach: it answers at every address and every port.

Run it as a program inside a network namespace that a test made, as root of that namespace. All packets are redirected
to listeners here that say `reached`. Port 53 is answered as a hostile owner's name server would. So a probe that gets
out always gets an answer. The program prints `ready` on stdout, then lives until stdin is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import struct
import subprocess
import sys
import threading

import dns.flags
import dns.message
import dns.rdatatype
import dns.rrset

GREETING = b"reached the world\n"
STREAM, DATAGRAM, NAMES = 9000, 9001, 9053

# With --anywhere every address is this namespace's own (AnyIP); without, what it only forwards is left alone.
RULES = """
table inet hostile_world {
    chain prerouting {
        type nat hook prerouting priority dstnat
        policy accept
        OTHERS
        udp dport 53 redirect to :9053
        tcp dport 53 redirect to :9053
        meta l4proto tcp redirect to :9000
        meta l4proto udp redirect to :9001
    }
}
"""
EVERY_ADDRESS = """
route add local default dev lo table 100
rule add pref 40000 lookup 100
"""

# INVARIANT: the first labels that agents/hostile/network/names.py asks for, below a wildcard that is granted.
REBINDS = {
    "private": "10.8.8.8", "metadata": "169.254.169.254", "loopback": "127.0.0.1", "zero": "0.0.0.0",
    "gateway": "192.0.0.1", "linklocal": "169.254.7.7", "second": "10.8.8.8",
    "mapped": "::ffff:10.8.8.8", "nat64": "64:ff9b::10.8.8.8", "sixtofour": "2002:a08:808::1",
    "uniquelocal": "fd00:9::9",
}  # fmt: skip
API, API_ADDRESS, API_ADDRESS6 = "api.example.com.", "93.184.216.34", "2606:2800:220:1::34"
OTHER_ADDRESS, OTHER_ADDRESS6 = "93.184.216.35", "2606:2800:220:1::35"
MANY = 12
PATIENCE_SECONDS = 0.3


def answer(question: dns.message.Message) -> dns.message.Message:
    """Return the answer of a hostile owner of every zone."""
    made = dns.message.make_response(question)
    made.flags |= dns.flags.AA | dns.flags.RA
    asked = question.question[0]
    name, kind = asked.name, asked.rdtype

    def add(owner: str, rdtype: str, *values: str) -> None:
        made.answer.append(dns.rrset.from_text(owner, 60, "IN", rdtype, *values))

    text = name.to_text()
    first = text.split(".")[0].lower()
    rebound = REBINDS.get(first, "")
    if first == "alias":
        add(text, "CNAME", "inside.evil.example.net.")
        add("inside.evil.example.net.", "A", REBINDS["private"])
    elif first == "unrelated":
        add(text, "A", OTHER_ADDRESS)
        add("victim.example.org.", "A", "9.9.9.77")
    elif first.startswith("many-"):
        number = int(first.removeprefix("many-"))
        add(text, "A", *(f"44.7.{number}.{last}" for last in range(1, MANY + 1)))
    elif kind == dns.rdatatype.A:
        if ":" not in rebound:
            public = [OTHER_ADDRESS] if first == "second" else []
            add(
                text, "A", *public, *([rebound] if rebound else [API_ADDRESS if text.lower() == API else OTHER_ADDRESS])
            )
    elif kind == dns.rdatatype.AAAA:
        if not rebound or ":" in rebound:
            add(text, "AAAA", rebound or (API_ADDRESS6 if text.lower() == API else OTHER_ADDRESS6))
    elif kind == dns.rdatatype.MX:
        add(text, "MX", "10 reached.evil.example.net.")
    elif kind in (dns.rdatatype.NULL, dns.rdatatype.ANY, dns.rdatatype.AXFR, dns.rdatatype.TXT):
        # NULL has no text form; any record is enough for a client that asked for it.
        add(text, "TXT", '"reached the world"')
    return made


def answered(data: bytes) -> bytes:
    """The answer as bytes; to what is no question, a plain greeting with one record's worth of lies."""
    if GREETING.strip() in data:
        return b""  # of another of these servers, to whose address a probe forged its own: no talk without end
    with contextlib.suppress(Exception):
        return answer(dns.message.from_wire(data, ignore_trailing=True)).to_wire()
    if len(data) < 12:
        return GREETING
    # Several questions, other classes and opcodes: flags of success and one record that no client parses.
    return data[:2] + b"\x85\x80" + struct.pack("!HHHH", 0, 1, 0, 0) + b"\0\0\x10\0\1\0\0\0\0\0\x01\0"


class Greeter(socketserver.BaseRequestHandler):
    """Says that it was reached, and reads until the other end has enough.

    To a TLS client it says so after a ServerHello: a gate that waits for one passes the rest on.
    """

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.settimeout(PATIENCE_SECONDS)
            try:
                first = self.request.recv(65536)
            except TimeoutError:
                first = b"?"
            self.request.sendall(server_hello() if first[:1] == b"\x16" else GREETING)
            self.request.settimeout(30)
            while self.request.recv(65536):
                pass


def server_hello() -> bytes:
    """A ServerHello (RFC 8446, 4.1.3), and the greeting as data of the connection, which no gate can read."""
    extensions = struct.pack("!HHH", 43, 2, 0x0304)
    body = b"\x03\x03" + os.urandom(32) + b"\0\x13\x01\0" + struct.pack("!H", len(extensions)) + extensions
    handshake = b"\x02" + len(body).to_bytes(3, "big") + body
    hello = b"\x16\x03\x03" + struct.pack("!H", len(handshake)) + handshake
    return hello + b"\x17\x03\x03" + struct.pack("!H", len(GREETING)) + GREETING


class Resolver(socketserver.BaseRequestHandler):
    """Port 53 over a stream."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.settimeout(30)
            while head := self.request.recv(2):
                told = answered(self.request.recv(int.from_bytes(head, "big")))
                self.request.sendall(struct.pack("!H", len(told)) + told)


class Streams(socketserver.ThreadingTCPServer):
    """A thread a connection; both families by one socket."""

    address_family = socket.AF_INET6
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 4096


def datagrams(port: int, reply: bool) -> None:
    """Answer every datagram."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        made.bind(("::", port))
        while True:
            data, peer = made.recvfrom(65535)
            told = answered(data) if reply else GREETING * (GREETING.strip() not in data)
            with contextlib.suppress(OSError):
                if told:
                    made.sendto(told, peer)


def main() -> None:
    """Take every address, serve, and go when stdin does."""
    anywhere = "--anywhere" in sys.argv
    if anywhere:
        for version in ("-4", "-6"):
            subprocess.run(["ip", version, "-batch", "-"], input=EVERY_ADDRESS, text=True, check=True)
    # The kernel's own word for "local" looks only into the table of that name, so AnyIP must not be asked.
    rules = RULES.replace("OTHERS", "" if anywhere else "fib daddr type != local accept")
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    servers = [Streams(("::", STREAM), Greeter), Streams(("::", NAMES), Resolver)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    for port, reply in ((DATAGRAM, False), (NAMES, True)):
        threading.Thread(target=datagrams, args=(port, reply), daemon=True).start()
    os.write(1, b"ready\n")
    sys.stdin.read()


if __name__ == "__main__":
    main()
