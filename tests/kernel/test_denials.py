"""Each refusal of a run is one row with one id; the lines that ``covenant denials`` names let the same probe pass.

Real runsc, with a network on an internet of the test's own. One run makes all the probes. The control is the same
package with the named lines, in which the same probes succeed.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.compile.network.firewall import LOG_BURST, LOG_PACKETS_PER_SECOND
from policy.denials import MAX_ROWS, Denial
from tests import cli_kit
from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.world import HEAD, TAIL, World, refused

FILL = "block = bytearray(400 << 20)\nfor i in range(0, len(block), 4096): block[i] = 1\nanswer = 1\n"
BUSY = "import time\ntime.sleep(60)\nanswer = 1\n"


@pytest.fixture
def networked(tmp_path: Path, warm: Path, net: Internet) -> Iterator[NetworkedWorld]:
    yield internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    assert net.leftovers() == []


def denied(world: World, run_id: str) -> list[dict[str, Any]]:
    """The rows of a run's denials."""
    kinds = [row["kind"] for row in world.rows()]
    return [kind for kind in kinds if kind["type"] == "denied" and kind["run_id"] == run_id]


def explained(world: World, subject: str | Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the denials of ``covenant denials`` by target."""
    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    found = cli_kit.document("denials", subject)
    return {one["target"]: one for one in found["denials"]}


def added(one: dict[str, Any], table: str) -> Any:
    """Return what the named lines write into a table of the manifest."""
    return tomllib.loads("\n".join(one["add"]))[table]


def test_memory_is_one_denial_and_its_line_mends_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = world.run_code(HEAD + FILL + TAIL, memory_mb=256)
    refused(errors.OutOfMemoryError, answer.error)
    (row,) = denied(world, answer.run_id)
    expected = Denial("memory", "memory_mb", "out_of_memory")
    assert (row["denial"], row["layer"], row["target"], row["code"]) == (
        expected.id,
        "memory",
        "memory_mb",
        expected.code,
    )
    assert (row["grant"], row["count"]) == ("resources.memory_mb", 1)
    assert [one.denial for one in answer.denials] == [expected]
    # Before the run's last row: a reader that follows the log has all rows of a run when it ends.
    assert world.rows()[-1]["kind"]["type"] == "run_ended"
    one = explained(world, world.base / "packages" / "probe", monkeypatch)["memory_mb"]
    assert added(one, "resources") == {"memory_mb": 512}
    assert world.ask(FILL, memory_mb=512) == 1


def test_deadline_is_one_denial_and_names_its_clock(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = world.run_code(HEAD + BUSY + TAIL, cpu_ms=700)
    refused(errors.DeadlineError, answer.error)
    (row,) = denied(world, answer.run_id)
    assert row["denial"] == Denial("time", "cpu_ms_per_task", "deadline").id
    one = explained(world, answer.run_id[:8], monkeypatch)["cpu_ms_per_task"]
    assert added(one, "resources") == {"cpu_ms_per_task": 1400}
    assert world.ask(BUSY.replace("60", "1"), cpu_ms=20_000) == 1
    answer = world.run_code(HEAD + BUSY + TAIL, request={"timeout_ms": 700})
    (row,) = denied(world, answer.run_id)
    assert (row["target"], row["grant"]) == ("timeout", None)
    one = explained(world, answer.run_id, monkeypatch)["timeout"]
    assert one["add"] == []
    assert "--timeout" in one["note"]


def test_run_in_which_nothing_was_refused_has_no_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = world.run_code(HEAD + "answer = 1" + TAIL)
    assert (answer.denials, denied(world, answer.run_id)) == ((), [])
    assert explained(world, answer.run_id, monkeypatch) == {}


# --- the network ---------------------------------------------------------------------------------------------------

GRANTED = (("api.example.com", "[443]", "tls"),)
# What is tried, how it ends where it is not granted and where it is, and the denial that it is.
PROBES: dict[str, tuple[Any, Any, Denial]] = {
    "resolve('www.example.com')": (
        "gaierror -2", ["93.184.216.35"], Denial("dns", "www.example.com", "name_not_granted"),
    ),
    "tls('other.example.com', '93.184.216.34')": (
        "ECONNRESET", "other.example.com", Denial("sni", "other.example.com:443/tls", "sni_not_granted"),
    ),
    "tcp('93.184.216.34', 80)": (
        "ECONNREFUSED", "connected", Denial("packet", "93.184.216.34:80/tcp", "not_granted"),
    ),
    "tcp('2606:4700::2222', 5432)": (
        "ECONNREFUSED", "connected", Denial("packet", "[2606:4700::2222]:5432/tcp", "not_granted"),
    ),
    "udp('9.9.9.9', 123)": ("ECONNREFUSED", "answered", Denial("packet", "9.9.9.9:123/udp", "not_granted")),
}  # fmt: skip
# libc asks netlink for addresses to sort by, and goes on without.
NETLINK = Denial("syscall", "socket", "arguments")
FIRST = "tls('api.example.com')"


def tried(networked: NetworkedWorld, more: str) -> tuple[Any, Any]:
    """The run's answer, and what each probe came to; api.example.com is reached first, which is granted."""
    code = HEAD + internet.probes([FIRST, *PROBES]) + TAIL
    files = {"main.py": code, "ca.pem": networked.internet.certificate}
    answer = networked.run(networked.sign(networked.package(files, network="full", more=more)))
    assert answer.error is None, (answer.error, answer.stderr)
    first, *rest = json.loads(answer.result.text)
    assert first == "api.example.com"
    return answer, dict(zip(PROBES, rest, strict=True))


def test_each_refusal_of_network_is_one_denial_whose_line_mends_it(
    networked: NetworkedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, found = tried(networked, internet.entries(*GRANTED))
    assert found == {probe: refused for probe, (refused, _, _) in PROBES.items()}
    rows = [row for row in denied(networked, answer.run_id) if row["target"] != NETLINK.target]
    expected = [denial for _, _, denial in PROBES.values()]
    # One id of each, even if the agent's libraries repeat a probe (they ask for a name twice, by IPv4 and IPv6).
    assert {row["denial"] for row in rows} == {denial.id for denial in expected}
    assert {(row["layer"], row["target"], row["code"]) for row in rows} == {
        (denial.layer, denial.target, denial.code) for denial in expected
    }
    assert len(rows) <= 2 * len(expected)
    assert {row.denial for row in answer.denials} - {NETLINK} == set(expected)
    # Every line that is named, together.
    told = explained(networked, networked.base / "packages" / "probe", monkeypatch)
    entries = [entry for denial in expected for entry in added(told[denial.target], "permissions")["network"]]
    lines = [(entry["host"], str(entry["ports"]), entry["protocol"]) for entry in entries]
    answer, found = tried(networked, internet.entries(*GRANTED, *lines))
    assert found == {probe: granted for probe, (_, granted, _) in PROBES.items()}
    assert {row.denial for row in answer.denials} <= {NETLINK}


FLOOD = """
import os, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sent = 0
for number in range(100_000):
    try:
        s.sendto(b"x", ("9.9.9.9", 1 + number % 60_000)); sent += 1
    except ConnectionRefusedError:
        pass
answer = sent
"""


def test_flood_of_refused_packets_is_few_rows(networked: NetworkedWorld) -> None:
    code = HEAD + internet.PROBES + FLOOD + TAIL
    answer = networked.run_code(code, network="full", more=internet.entries(*GRANTED), cpu_ms=100_000)
    assert answer.error is None, (answer.error, answer.stderr)
    told = [row for row in denied(networked, answer.run_id) if row["layer"] == "packet"]
    # A few rows a turn: an older denial's row may come after the row that counts all others.
    rows, (rest,) = [row for row in told if row["target"]], [row for row in told if not row["target"]]
    # The rule's rate during the run limits the rows, not the packets that the agent sends.
    bound = LOG_BURST + LOG_PACKETS_PER_SECOND * (answer.timings["sandbox"] + 2)
    assert LOG_BURST / 2 <= len(rows) <= bound
    assert len(rows) <= MAX_ROWS
    assert sum(row["count"] for row in rows) <= bound
    assert answer.result is not None
    # All others are one number, taken from the ruleset's own counters; a full queue on the way has lost some.
    assert (rest["target"], rest["code"], rest["grant"]) == ("", "not_listed", None)
    assert sum(row["count"] for row in rows) + rest["count"] >= json.loads(answer.result.text) // 2
