"""An agent under gVisor and the TLS gate: real handshakes by the agent's own OpenSSL, and hellos put together by hand.

One run tries everything, so that each refusal stands beside the same bytes with a granted name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.control import manager
from sandbox.control.manager import Requester
from tests import hello_kit as kit
from tests.kernel import internet, live_runs, tls_servers
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.world import HEAD, TAIL

NAME, OTHER, ALONE = "api.example.com", "other.example.com", "www.example.com"
NAMED, NAMED6, GRANTED, GRANTED6 = "93.184.216.34", "2606:4700::1111", "198.51.100.7", "fd00:9::9"
# 444 answers a hello and goes on in clear, which shows what passes; 445 asks every client for a second hello.
TLS, CLEAR, RETRY = 443, 444, 445
GRANTS = internet.entries(
    (NAME, f"[{TLS}, {CLEAR}, {RETRY}]", "tls"),
    (ALONE, f"[{TLS}]", "tls"),
    (GRANTED, f"[{TLS}, {CLEAR}]", "tls"),
    (GRANTED6, f"[{TLS}]", "tls"),
)
# More connections, one after the other, than the gate reports one by one.
MANY = 300

PROBES = """
import threading, time
with open("/workspace/hellos.json") as file:
    data = {key: [bytes.fromhex(piece) for piece in value] for key, value in json.load(file).items()}
def exactly(s, size):
    out = b""
    while len(out) < size:
        more = s.recv(size - len(out))
        if not more:
            break
        out += more
    return out
def opened(host, port=444):
    s = socket.create_connection((host, port), timeout=30)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s
def say(key, host, port=444, pause=0.0):
    try:
        with opened(host, port) as s:
            for piece in data[key]:
                s.sendall(piece)
                time.sleep(pause)
            return "answered" if len(exactly(s, ANSWER)) == ANSWER else "ended"
    except OSError as e:
        return errno.errorcode.get(e.errno or 0, str(e))
def carried(host):
    s = opened(host)
    s.sendall(data["granted"][0])
    assert len(exactly(s, ANSWER)) == ANSWER
    return s
def half(host):
    with carried(host) as s:
        s.sendall(b"take 100000\\n" + b"x" * 70000)
        s.shutdown(socket.SHUT_WR)
        return exactly(s, 100).decode()
def moved(name, size):
    context = ssl.create_default_context(cafile="/workspace/ca.pem")
    out = []
    for verb in ("give", "take"):
        with context.wrap_socket(socket.create_connection((name, 443), timeout=60), server_hostname=name) as s:
            s.sendall(f"{verb} {size}\\n".encode())
            if verb == "give":
                out.append(len(exactly(s, size)))
            else:
                s.sendall(b"z" * size)
                out.append(int(exactly(s, 100)))
    return out
def many(host, count):
    made = [opened(host) for _ in range(count)]
    for s in made:
        s.sendall(data["granted"][0])
    good = [len(exactly(s, ANSWER)) == ANSWER for s in made]
    for number, s in enumerate(made):
        s.sendall(b"echo\\n" + str(number).encode() * 3000)
    for number, s in enumerate(made):
        wanted = str(number).encode() * 3000
        good.append(exactly(s, len(wanted)) == wanted)
        s.close()
    return [len(good), all(good)]
def retried(second):
    # The second hello of a real handshake, as it is or changed; the server wants a group that is not offered first.
    context = ssl.create_default_context(cafile="/workspace/ca.pem")
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(coming, going, server_hostname="api.example.com")
    try:
        with opened("api.example.com", 445) as s:
            for flight in range(2):
                try:
                    client.do_handshake()
                except ssl.SSLWantReadError:
                    pass
                raw = going.read()
                s.sendall(raw.replace(b"api.example.com", second) if flight else raw)
                answer = s.recv(65536)
                if not answer:
                    return "ended"
                coming.write(answer)
            return "answered"
    except OSError as e:
        return errno.errorcode.get(e.errno or 0, str(e))
"""


def hellos() -> dict[str, list[bytes]]:
    """Return the agent's ClientHellos, in segments."""

    def padded(name: str, size: int) -> bytes:
        short = len(kit.message(kit.body(kit.server_name(name.encode()), kit.extension(21, b""))))
        return kit.message(kit.body(kit.server_name(name.encode()), kit.extension(21, b"\0" * (size - short))))

    def split(name: str) -> list[bytes]:
        data = kit.records(padded(name, 500), (1, 2, 3, 60, 5, 40, 80))
        return [data[at : at + 30] for at in range(0, len(data), 30)]

    return {
        "granted": [kit.hello(NAME)],
        "nameless": [kit.hello(None)],
        "hidden": [kit.hello(NAME, kit.extension(kit.ECH, b"\0" * 64))],
        "twice": [kit.record(kit.message(kit.body(kit.server_name(NAME.encode()), kit.server_name(OTHER.encode()))))],
        "other first": [kit.hello(OTHER) + kit.hello(NAME)],
        "nul": [kit.record(kit.message(kit.body(kit.server_name(b"other.example.com\0.example.com"))))],
        "http": [b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n"],
        "alert first": [kit.record(b"\x01\x70", kind=21) + kit.hello(NAME)],
        "split": split(NAME),
        "split other": split(OTHER),
        "longest": [kit.records(padded(NAME, 16384), (16384,))],
        "too long": [kit.records(padded(NAME, 17 << 10), (16384,))],
        "half": [kit.hello(NAME)[:-1]],
    }


# The expression, what it gives, and the code of the denial that it leaves.
TABLE: tuple[tuple[str, Any, str | None], ...] = (
    (f"tls('{NAME}')", NAME, None),
    (f"tls('{NAME}', '{NAMED6}')", NAME, None),
    (f"tls('{ALONE}')", ALONE, None),
    (f"tls('{OTHER}', '{NAMED}')", "ECONNRESET", "sni_not_granted"),
    (f"tls('{OTHER}', '{NAMED6}')", "ECONNRESET", "sni_not_granted"),
    (f"tls('{OTHER}', '{GRANTED}')", OTHER, None),
    (f"tls('{OTHER}', '{GRANTED6}')", OTHER, None),
    (f"say('granted', '{NAMED}')", "answered", None),
    (f"say('granted', '{NAMED6}')", "answered", None),
    (f"say('nameless', '{NAMED}')", "ECONNRESET", "no_sni"),
    (f"say('nameless', '{GRANTED}')", "answered", None),
    # A granted name, and an address that is granted as such and is none of its own.
    (f"say('granted', '{GRANTED}')", "answered", None),
    (f"say('hidden', '{NAMED}')", "ECONNRESET", "ech_present"),
    (f"say('twice', '{NAMED}')", "ECONNRESET", "malformed"),
    (f"say('nul', '{NAMED}')", "ECONNRESET", "malformed"),
    (f"say('other first', '{NAMED}')", "ECONNRESET", "sni_not_granted"),
    (f"say('http', '{NAMED}')", "ECONNRESET", "not_tls"),
    (f"say('http', '{GRANTED}')", "ECONNRESET", "not_tls"),
    (f"say('alert first', '{NAMED}')", "ECONNRESET", "not_tls"),
    (f"say('split', '{NAMED}', pause=0.01)", "answered", None),
    (f"say('split other', '{NAMED}', pause=0.01)", "ECONNRESET", "sni_not_granted"),
    (f"say('longest', '{NAMED}')", "answered", None),
    (f"say('too long', '{NAMED}')", "ECONNRESET", "hello_too_long"),
    (f"say('half', '{NAMED}')", "ECONNRESET", "hello_timeout"),
    # Neither the gate's own port nor the grant's port by another protocol.
    ("say('granted', '192.0.0.1', 8443)", "ECONNREFUSED", None),
    ("say('granted', 'fd00:c0:0:1::1', 8443)", "ECONNREFUSED", None),
    (f"udp('{NAMED}', 443)", "ECONNREFUSED", None),
    (f"half('{NAMED}')", "70000", None),
    (f"moved('{NAME}', 4 << 20)", [4 << 20, 4 << 20], None),
    (f"many('{NAMED}', 100)", [200, True], None),
    (f"retried(b'{NAME}')", "answered", None),
    ("retried(b'www.example.com')", "ECONNRESET", "sni_not_granted"),
)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    certificates = tls_servers.Certificates(tmp_path_factory.mktemp("tls"), NAME)
    retrying = certificates.server(groups="secp384r1")
    with internet.made() as made, contextlib.ExitStack() as stack:
        for port, context in ((CLEAR, None), (RETRY, retrying)):
            listeners = [made.bound("world", host, port) for host in ("0.0.0.0", "::")]
            stack.enter_context(tls_servers.serving(context, *listeners))
        yield made


def test_what_gate_lets_through_and_what_it_resets(tmp_path: Path, warm: Path, net: Internet) -> None:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    files = {
        "ca.pem": net.certificate,
        "hellos.json": json.dumps({key: [one.hex() for one in value] for key, value in hellos().items()}),
    }
    calls = ", ".join(call for call, _, _ in TABLE)
    code = f"ANSWER = {len(kit.server_hello())}\n{PROBES}answer = [{calls}]\n"
    answer = world.ask(
        internet.PROBES + internet.TLS_PROBE + code,
        network="full",
        more=GRANTS,
        files=files,
        cpu_ms=60000,
        memory_mb=256,
    )
    assert dict(zip([call for call, _, _ in TABLE], answer, strict=True)) == {call: gives for call, gives, _ in TABLE}
    told = {row["kind"]["code"] for row in world.rows() if row["kind"]["type"] == "denied"}
    assert {code for _, _, code in TABLE if code} <= told
    reached = {row["kind"]["target"]: row["kind"] for row in world.rows() if row["kind"]["type"] == "reached"}
    # By a granted address the agent chose the name in its hello, so the row has the address.
    assert set(reached) == {
        f"{NAME}:{TLS}/tls", f"{NAME}:{CLEAR}/tls", f"{NAME}:{RETRY}/tls", f"{ALONE}:{TLS}/tls",
        f"{GRANTED}:{TLS}/tls", f"{GRANTED}:{CLEAR}/tls", f"[{GRANTED6}]:{TLS}/tls",
    }  # fmt: skip
    assert reached[f"{NAME}:{TLS}/tls"]["connections"] == 4
    assert reached[f"{NAME}:{TLS}/tls"]["bytes"] > 8 << 20
    assert reached[f"{NAME}:{CLEAR}/tls"]["connections"] == 105
    assert reached[f"{GRANTED}:{CLEAR}/tls"]["connections"] == 2
    assert net.leftovers() == []


def test_last_destination_of_many_connections_has_its_row(tmp_path: Path, warm: Path, net: Internet) -> None:
    """The gate reports at a limited rate: what is left when the agent ends is asked for."""
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    files = {
        "ca.pem": net.certificate,
        "hellos.json": json.dumps({"granted": [one.hex() for one in hellos()["granted"]]}),
    }
    calls = f"[tls('{NAME}'), *{{say('granted', '{NAMED}') for _ in range({MANY})}}, tls('{ALONE}')]"
    code = f"ANSWER = {len(kit.server_hello())}\n{PROBES}answer = {calls}\n"
    answer = world.ask(
        internet.PROBES + internet.TLS_PROBE + code, network="full", more=GRANTS, files=files, cpu_ms=60000
    )
    assert answer == [NAME, "answered", ALONE]
    reached = {row["kind"]["target"]: row["kind"] for row in world.rows() if row["kind"]["type"] == "reached"}
    assert {name: one["connections"] for name, one in reached.items()} == {
        f"{NAME}:{TLS}/tls": 1, f"{NAME}:{CLEAR}/tls": MANY, f"{ALONE}:{TLS}/tls": 1,
    }  # fmt: skip
    each = len(kit.server_hello()) + len(hellos()["granted"][0])
    assert reached[f"{NAME}:{CLEAR}/tls"]["bytes"] == MANY * each
    assert lost(world.rows()) == []


@pytest.mark.parametrize(("how", "code"), [("dies", "gate_died"), ("is killed with its run", "stopped")])
def test_gate_that_cannot_report_leaves_note(tmp_path: Path, warm: Path, net: Internet, how: str, code: str) -> None:
    """A kill of a tree ends the gates together with the agent."""
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    probe = HEAD + internet.PROBES + internet.TLS_PROBE + f"tls('{NAME}')\ntime.sleep(300)\n" + TAIL
    with live_runs.live(world, probe, files={"ca.pem": net.certificate}, network="full", more=GRANTS) as one:
        if how == "dies":
            os.kill(live_runs.gate(b"sandbox.network.tls.server"), signal.SIGKILL)
        else:
            manager.operate(world.state, Requester("operator@local", root=True), "kill", one.made.run_id, tree=True)
        error = one.wait().error
    assert error is not None
    assert error.code == code
    assert len(lost(world.rows())) == 1


def lost(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The notes of destinations that may not be counted."""
    return [one["kind"] for one in rows if "had reported all" in one["kind"].get("reason", "")]
