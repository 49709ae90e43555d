"""The report to a caller on the runs of its request: rows byte for byte, the use of a family, and their caller."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.handlers import billing
from covenant.runtime.runner import Usage
from covenant.runtime.supervisor_report import Family, SupervisorReport
from covenant.stores.audit import files as audit_files
from policy import errors, standby
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import events, verify
from sandbox.rundir import registry
from sandbox.serve.api import client
from tests import daemon_kit
from tests.daemon_kit import Daemon
from tests.kernel import families, serving
from tests.kernel.serving import CALLER, Served
from tests.kernel.test_serve import eventually
from tests.kernel.world import HEAD, SLOWNESS, TAIL, World

pytestmark = pytest.mark.anyio

KEY = "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"
# By its own clock, and so much work beside it: gVisor's clock goes on while the machine has something else to do, and
# how long the work takes is the processor's speed (tests/kernel/test_usage.py).
_CLOCK = "import time\nuntil = time.process_time() + 0.5\n"
_BURN = _CLOCK + "for _ in range(20_000_000): pass\nwhile time.process_time() < until: pass\n"
_READS = 'answer = intent["issuer"]\n'
_SMALL = {**families.SMALL, "resources": "pids_max = 16\ncpu_millis = 500\n"}


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as made:
        world = made.world
        families.member(world, "works", _BURN + "answer = 1", **_SMALL)
        families.member(world, "sleeps", "import time\ntime.sleep(600)", more=families.spawn(1, 1, "adopt"), **_SMALL)
        families.member(world, "reads", _READS, **_SMALL)
        yield made


def _top(world: World, name: str, code: str, **more: Any) -> Path:
    return families.member(world, name, code, more=families.spawn(**more), **families.BIG)


def _asked(served: Served, package: Path, **fields: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The document that answers, or the error's, and the rows that came before it."""
    beside: list[Any] = []
    with served.connected() as sock, serving.opened(package) as directory:
        try:
            document = client.ask(sock, "run", fds=[directory], text="hi", said=beside.append, **fields)
        except errors.CovenantError as e:
            document = e.to_json()
    rows = [one for one in beside if one["kind"] == "rows"]
    assert len(rows) == bool(fields.get("rows"))
    return document, rows[0] if rows else None


def _log(served: Served) -> list[tuple[bytes, bytes]]:
    """Each anchor of the supervisor's log with its event, as they stand on the disk."""
    place = served.world.state / "audit"
    lines = [(place / name).read_bytes().splitlines() for name in ("events.chain.jsonl", "events.jsonl")]
    return list(zip(*lines, strict=True))


def _of(served: Served, *runs: str) -> list[tuple[bytes, bytes]]:
    return [one for one in _log(served) if (row := events.begins(one[1])) is not None and row.run_id in runs]


def _lines(told: dict[str, Any] | None) -> list[tuple[bytes, bytes]]:
    assert told is not None
    return [(anchor.encode(), line.encode()) for anchor, line in told["rows"]]


def _ended(lines: list[tuple[bytes, bytes]]) -> list[dict[str, Any]]:
    kinds = [json.loads(line)["kind"] for _, line in lines]
    return [kind for kind in kinds if kind["type"] == "run_ended"]


def test_family_comes_byte_for_byte_as_log_has_it_and_with_what_it_used(served: Served) -> None:
    limits = {"memory_mb": 512, "resources": "pids_max = 128\ncpu_millis = 1000\n"}
    families.member(served.world, "middle", "answer = child('works')", more=families.spawn(2, 2), **limits)
    top = _top(served.world, "told", "answer = child('middle')")
    answer, told = _asked(served, top, rows=True)
    assert told is not None
    found = _lines(told)
    runs = {kind["run_id"] for kind in _ended(found)}
    assert len(runs) == 3, answer
    assert answer["run_id"] in runs
    assert found == _of(served, *runs)
    public = audit_log_chain.read_public_key((served.world.state / "audit-head" / "ledger.pub").read_bytes())
    assert told["origin"] == audit_log_chain.key_id(public)
    assert (told["left_out"], told["whole"]) == (0, True)
    ended = _ended(found)
    used = sum(kind["cpu_ms"] for kind in ended)
    family = told["family"]
    assert (family["runs"], family["unended"], family["cpu_ms"]) == (3, 0, used)
    assert family["memory_byte_ms"] == sum(kind["memory_peak_bytes"] * kind["wall_ms"] for kind in ended)
    assert used >= 100
    # The control: who does not ask is told nothing.
    assert _asked(served, top)[1] is None


def test_refusal_and_failure_bring_their_rows_and_another_run_s_are_not_among_them(served: Served) -> None:
    world = served.world
    unsigned = world.package({"main.py": HEAD + "answer = 1\n" + TAIL}, name="unsigned", id="unsigned")
    fails = world.sign(world.package({"main.py": HEAD + "sys.exit(3)\n"}, name="fails", id="fails"))
    other = families.member(world, "other", _BURN + "answer = 1", **_SMALL)
    with serving.asked(served.path, other):
        refused, told = _asked(served, unsigned, rows=True)
        assert refused["code"] == errors.UnsignedError.code
        ((_, line),) = _lines(told)[-1:]
        assert json.loads(line)["kind"]["code"] == errors.UnsignedError.code
        failed, told = _asked(served, fails, rows=True)
        assert failed["error"]["code"] == errors.AgentFailedError.code
        assert _lines(told) == _of(served, failed["run_id"])


def test_whoever_is_not_root_hears_of_refusal_that_has_no_run(served: Served) -> None:
    world = served.world
    package = world.package({"main.py": HEAD + "answer = 1\n" + TAIL}, name="theirs", id="theirs")
    package.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(CALLER)
            os.setuid(CALLER)
            refused, told = _asked(served, package, rows=True)
            ((_, line),) = _lines(told)
            row = json.loads(line)
            assert row["issuer"]["display"] == f"uid{CALLER}@local"
            assert (row["kind"]["type"], row["kind"]["run_id"]) == ("manifest_rejected", None)
            assert row["kind"]["code"] == refused["code"] == errors.UnsignedError.code
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_child_whose_keeper_was_killed_has_its_end_and_its_use_among_rows(served: Served) -> None:
    families.member(served.world, "burns", "while True: pass", **_SMALL)
    top = _top(served.world, "loses", "answer = child('burns')")
    told: list[Any] = []

    def ask() -> None:
        told.extend(_asked(served, top, rows=True))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        child = eventually(lambda: _live(served, "burns"))
        begun = _cpu_ms(child)
        eventually(lambda: _cpu_ms(child) >= begun + 600)
        os.kill(child.keeper, signal.SIGKILL)
    finally:
        asking.join(120 * SLOWNESS)
    answer, beside = told
    assert answer["result"]["text"] == json.dumps(
        {"error": {"code": "cut_off", "message": "whoever kept the run is gone"}}
    )
    ended = {kind["run_id"]: kind for kind in _ended(_lines(beside))}
    assert ended[child.run_id]["code"] == errors.CutOffError.code
    assert ended[child.run_id]["cpu_ms"] >= 300
    assert ended[child.run_id]["wall_ms"] is None
    assert (beside["family"]["runs"], beside["family"]["unended"], beside["family"]["uncounted"]) == (2, 0, 1)
    assert beside["family"]["cpu_ms"] == sum(kind["cpu_ms"] for kind in ended.values())


def _live(served: Served, agent_id: str) -> registry.Entry | None:
    entries = registry.live(served.world.state / "runs")
    return next((one for one in entries if one.agent_id == agent_id and one.state == "Running"), None)


def _cpu_ms(entry: registry.Entry) -> int:
    for name, file, unit in (("cpuacct", "cpuacct.usage", 1_000_000), ("cpu", "cpu.stat", 0)):
        place = entry.cgroups.get(name)
        if place is not None and (place / file).exists():
            text = (place / file).read_text()
            return int(text) // unit if unit else int(text.split()[1]) // 1000
    return 0


def test_who_outlives_its_root_is_counted_as_not_ended(served: Served) -> None:
    top = _top(served.world, "leaves", "answer = ask(kind='spawn', agent='sleeps', text='')", fate="adopt")
    answer, told = _asked(served, top, rows=True)
    assert told is not None
    assert (told["family"]["runs"], told["family"]["unended"]) == (2, 1)
    orphan = eventually(lambda: _live(served, "sleeps"))
    assert {row.run_id for _, line in _lines(told) if (row := events.begins(line))} == {answer["run_id"], orphan.run_id}
    with served.connected() as sock:
        client.ask(sock, "operate", operation="kill", run=orphan.run_id)


# --- for whom ---------------------------------------------------------------------------------------------------------


def _whom(display: str = "ada@laptop") -> dict[str, str]:
    return {"pubkey_b58": KEY, "display": display}


def test_agent_reads_for_whom_it_is_asked_and_log_names_both(served: Served) -> None:
    reads = served.world.base / "packages" / "reads"
    plain, _ = _asked(served, reads)
    assert json.loads(plain["result"]["text"])["display"] == "operator@local"
    for display in ("ada@laptop", "operator@local", "x@h.via.uid7"):
        answer, _ = _asked(served, reads, on_behalf_of=_whom(display))
        assert json.loads(answer["result"]["text"]) == {"display": f"{display}.via.operator", "pubkey": KEY}
        (started,) = [
            row for row in served.world.rows() if row["kind"]["type"] == "run_started"
            and row["kind"]["run_id"] == answer["run_id"]
        ]  # fmt: skip
        assert started["issuer"]["display"] == "operator@local"
        assert (started["kind"]["behalf_display"], started["kind"]["behalf_pubkey"]) == (display, KEY)


def test_child_reads_its_parent_s_run_under_key_that_its_parent_reads(served: Served) -> None:
    top = _top(served.world, "asks", "answer = child('reads')")
    answer, told = _asked(served, top, rows=True, on_behalf_of=_whom())
    child = json.loads(json.loads(answer["result"]["text"])["ok"]["text"])
    assert child == {"display": f"asks@{answer['run_id']}", "pubkey": KEY}
    kinds = [json.loads(line)["kind"] for _, line in _lines(told)]
    assert [kind["behalf_display"] for kind in kinds if kind["type"] == "run_started"] == ["ada@laptop"] * 2


@pytest.mark.parametrize(
    "whom",
    [
        {"display": "ada@laptop"},
        {**_whom(), "role": "operator"},
        {**_whom(), "pubkey_b58": "1" * 31},
        {**_whom(), "pubkey_b58": "0" * 44},
        _whom("ada"),
        _whom("ada@lap top"),
        _whom("ada@laptop\n"),
        _whom("ada@" + "x" * 257),
        _whom("ад@laptop"),
        "ada@laptop",
    ],
)
def test_for_whom_is_closed_and_bounded_field(served: Served, whom: Any) -> None:
    refused, _ = _asked(served, served.world.base / "packages" / "reads", on_behalf_of=whom)
    assert refused["code"] == errors.RequestError.code


def test_of_instance_rows_of_its_making_are_told_too(served: Served) -> None:
    code = HEAD + "answer = 1\n" + TAIL
    ready = served.world.package({"main.py": code}, name="ready", id="ready")
    manifest = ready / "agent.toml"
    manifest.write_text(manifest.read_text().replace("[sandbox]\n", "[sandbox]\nstandby = 1\n"))
    served.world.sign(ready)
    _asked(served, ready)

    def warm() -> list[dict[str, Any]] | None:
        eventually(lambda: list((served.world.state / "runs").glob("*/standby-*")))
        answer, told = _asked(served, ready, rows=True, on_behalf_of=_whom())
        lines = _lines(told)
        assert lines == _of(served, answer["run_id"])
        rows = [json.loads(line) for _, line in lines]
        # One that is too slow to take it leaves it to a run that starts cold.
        return rows if rows[0]["issuer"]["display"] == "standby@local" else None

    rows = eventually(warm)
    assert standby.MADE_AHEAD in [row["kind"].get("reason") for row in rows]
    (started,) = [row["kind"] for row in rows if row["kind"]["type"] == "run_started"]
    assert started["behalf_display"] == "ada@laptop"


# --- through the daemon -----------------------------------------------------------------------------------------------


def _home(served: Served, *packages: str) -> Path:
    """A daemon's home with these packages."""
    home = served.world.base / f"home-{uuid.uuid4()}"
    (home / "agents").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    for name in packages:
        shutil.copytree(served.world.base / "packages" / name, home / "agents" / name)
    return home


async def test_daemons_log_has_supervisor_s_rows_byte_for_byte(served: Served) -> None:
    _top(served.world, "spends", "answer = [child('works'), intent['issuer']]")
    home = _home(served, "spends", "works")
    async with daemon_kit.running(home, socket=served.path) as daemon:
        await daemon.grant("memory.write")
        with anyio.fail_after(120 * SLOWNESS):
            result = await daemon.ask("submit_intent", text="x", agent="spends")
        copied = await _kinds(daemon, "supervisor_row")
        runs = {row["run_id"] for row in copied}
        assert len(runs) == 2
        log = _of(served, *runs)
        assert [row["line"].encode() for row in copied] == [line for _, line in log]
        for row, (anchor, _) in zip(copied, log, strict=True):
            place = audit_log_chain.Anchor.parse(anchor)
            assert place is not None
            assert (row["index"], row["event_id"]) == (place.index, place.event_id)
            assert (row["event_hash_hex"], row["chain_hash_hex"]) == (place.event_hash_hex, place.chain_hash_hex)
            assert row["intent_id"] == result["intent_id"]
        ended = _ended(log)
        assert {kind["run_id"] for kind in ended} == runs
        (family,) = await _kinds(daemon, "family_usage")
        assert family["cpu_ms"] == sum(kind["cpu_ms"] for kind in ended)
        (used,) = await _kinds(daemon, "run_usage")
        whole = _cost_of(family)
        assert used["credits"] == result["settlement"]["credits_consumed"] == whole
        reads = json.loads(result["text"])[1]
        assert reads["display"].endswith(".via.operator")
        assert reads["pubkey"] == daemon.server.identity.agent.pubkey
        assert (await daemon.ask("verify_audit_integrity"))["report"]["valid"] is True
    events_, chain = ((home / "audit" / name).read_bytes() for name in ("events.jsonl", "events.chain.jsonl"))
    key = audit_log_chain.read_public_key((home / "audit-head" / "ledger.pub").read_bytes())
    assert verify.verify(events_, chain, (home / "audit-head" / "head.json").read_bytes(), key).valid


async def test_copied_row_is_on_disk_once(served: Served) -> None:
    _top(served.world, "hands", "answer = child('works')")
    home = _home(served, "hands", "works")
    async with daemon_kit.running(home, socket=served.path) as daemon:
        await daemon.grant("memory.write")
        with anyio.fail_after(120 * SLOWNESS):
            first = await daemon.ask("submit_intent", text="x", agent="hands", idempotency_key="one")
            again = await daemon.ask("submit_intent", text="x", agent="hands", idempotency_key="one")
        assert again["intent_id"] == first["intent_id"]
    # A start reads the log again, and completes its files.
    async with daemon_kit.running(home, socket=served.path) as daemon:
        copied = await _kinds(daemon, "supervisor_row")
        await daemon.ask("recent_audit", limit=500)
    assert len({row["run_id"] for row in copied}) == 2
    files = {path.relative_to(home): path.read_bytes() for path in home.rglob("*") if path.is_file()}
    # The write-ahead file has the newest rows too, and its size is fixed.
    assert len(files.pop(Path("audit-head/pending"))) == audit_files.PENDING_BYTES
    log = Path("audit/events.jsonl")
    for row in copied:
        line = json.dumps(row["line"], ensure_ascii=False).encode()
        assert files[log].count(line) == 1
        # Its id is in the line, and beside it.
        found = {path: count for path, data in files.items() if (count := data.count(row["event_id"].encode()))}
        assert found == {log: 2}


async def test_of_run_whose_keeper_was_killed_daemon_says_that_its_rows_are_missing(served: Served) -> None:
    home = _home(served, "sleeps")
    places: list[Path] = []
    async with daemon_kit.running(home, socket=served.path) as daemon:
        await daemon.grant("memory.write")

        async def kill() -> None:
            top = await anyio.to_thread.run_sync(lambda: eventually(lambda: _live(served, "sleeps")))
            places.append(top.path)
            os.kill(top.keeper, signal.SIGKILL)

        with anyio.fail_after(120 * SLOWNESS):
            async with anyio.create_task_group() as group:
                group.start_soon(kill)
                with pytest.raises(errors.CovenantError):
                    await daemon.ask("submit_intent", text="x", agent="sleeps")
        (missing,) = await _kinds(daemon, "supervisor_rows_missing")
        assert (missing["copied"], missing["left_out"]) == (0, None)
        assert "before its answer" in missing["reason"]
        assert await _kinds(daemon, "supervisor_row") == []
    # A supervisor that is stopped before leaves the clean-up to its next start.
    await anyio.to_thread.run_sync(lambda: eventually(lambda: not places[0].exists()))


def _cost_of(family: dict[str, Any]) -> int:
    """Return the cost of a family that asked nothing of a service gate, by its own row."""
    used = Family(**{name: family[name] for name in Family.__slots__ if name != "credits"}, credits=0)
    return billing.cost(Usage(0, 0, 0), SupervisorReport(family=used))


async def _kinds(daemon: Daemon, kind: str) -> list[dict[str, Any]]:
    found = [one.kind for one in await daemon.server.audit.recent(500)]
    return [one for one in reversed(found) if one["type"] == kind]
