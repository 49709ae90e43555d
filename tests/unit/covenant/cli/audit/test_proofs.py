"""``covenant audit`` over the daemon's log: what a killed daemon left, checkpoints, witnesses, cuts."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner, Result

from covenant.cli.audit.commands import audit
from covenant.handlers.caller import Caller
from covenant.keys import identity
from covenant.stores.audit import checkpoints
from covenant.stores.audit.durable import DurableAudit
from covenant.stores.capabilities.in_memory import InMemoryCapabilities
from covenant.stores.capabilities.interface import to_wire
from covenant.wire import client, requests
from policy import errors
from policy.audit_log import note
from policy.capabilities.token import Token
from sandbox.storage import atomic_file
from tests import server_kit


def call(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(audit, list(arguments), input=stdin)


def works(*arguments: str, stdin: str | bytes | None = None) -> str:
    result = call(*arguments, stdin=stdin)
    assert result.exception is None, result.exception
    return result.stdout


@pytest.fixture
def home(covenant_home: Path) -> Path:
    covenant_home.mkdir(mode=0o700)
    return covenant_home


async def opened(home: Path) -> DurableAudit:
    agent = identity.Identity.load(home).agent
    return await DurableAudit.open(home, issuer=agent, now_ms=lambda: server_kit.NOW_MS, origin=None)


def fill(home: Path, count: int, *, signed: bool = True) -> list[str]:
    async def run() -> list[str]:
        async with await opened(home) as log:
            ids = []
            for n in range(count):
                row = {"transport": "ipc", "reason": f"row {n}"}
                ids.append(await log.append("authentication_failed", row))
            if signed:
                await log.checkpoint()
            return ids

    return anyio.run(run)


class InProcess:
    """The daemon's answers, without a socket: the same handlers over the same files."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        request = requests.parse(json.dumps({"kind": kind, **fields}).encode())

        async def run() -> str:
            me = identity.Identity.load(self._home)
            capabilities = InMemoryCapabilities(me.agent.pubkey)
            token = Token(me.agent.pubkey, "audit.purge", {}, me.agent.pubkey, None)
            granted = to_wire(token, me.grant(token), me.agent.display, me.agent.display)
            await capabilities.grant(granted, server_kit.NOW_MS)
            async with await opened(self._home) as log:
                server = server_kit.make(home=self._home, identity=me, audit=log, capabilities=capabilities)
                caller = Caller(agent=me.agent, operator=True, token_prefix="x", transport="ipc")
                return (await server.respond(caller, request)).model_dump_json()

        return client.decoded(anyio.run(run).encode())


@pytest.fixture
def daemon(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    @contextlib.contextmanager
    def connected(place: Path, **_: Any) -> Iterator[InProcess]:
        yield InProcess(place)

    monkeypatch.setattr(client, "connected", connected)
    return home


# What a killed daemon left ---------------------------------------------------------------------------------------


def test_what_pending_acknowledged_is_read_where_files_lack_it(home: Path) -> None:
    fill(home, 2, signed=False)
    files = [home / "audit" / "events.jsonl", home / "audit" / "events.chain.jsonl", home / "audit-head" / "head.json"]
    before = [file.read_bytes() for file in files]

    async def killed() -> None:
        log = await opened(home)
        await log.append("authentication_failed", {"transport": "ipc", "reason": "last"})
        copies.extend(file.read_bytes() for file in files)
        copies.append((home / "audit-head" / "pending").read_bytes())
        await log.close()

    copies: list[bytes] = []
    anyio.run(killed)
    (home / "audit-head" / "pending").write_bytes(copies[3])
    for lost in range(8):
        for at, file in enumerate(files):
            file.write_bytes(before[at] if lost >> at & 1 else copies[at])
        found = json.loads(works("verify", "--json"))
        assert (found["report"]["valid"], found["report"]["events"]) == (True, 3)


def test_row_that_pending_does_not_name_is_still_red(home: Path) -> None:
    fill(home, 2)
    with (home / "audit" / "events.jsonl").open("ab") as stream:
        stream.write(b'{"id":"forged"}\n')
    assert call("verify").exit_code == 3


@pytest.mark.parametrize("purging", [False, True])
def test_reading_beside_daemon_that_writes_is_never_red(home: Path, purging: bool) -> None:
    fill(home, 1, signed=False)
    clock = itertools.count(server_kit.NOW_MS + 1)

    async def run() -> None:
        agent = identity.Identity.load(home).agent
        done = anyio.Event()
        async with await DurableAudit.open(home, issuer=agent, now_ms=lambda: next(clock)) as log:

            async def write() -> None:
                while not done.is_set():
                    await log.append("authentication_failed", {"transport": "ipc", "reason": "x" * 500})
                    if purging:
                        await log.purge(next(clock) - 50)

            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(write)
                for _ in range(25):
                    result = await anyio.to_thread.run_sync(call, "verify", "--json")
                    assert result.exception is None, (result.exception, result.stdout)
                done.set()

    anyio.run(run)


# Checkpoints -----------------------------------------------------------------------------------------------------


def test_verify_holds_rows_against_every_checkpoint(home: Path) -> None:
    fill(home, 5)
    assert json.loads(works("verify", "--json"))["report"]["valid"]
    file = home / "audit" / "checkpoints.jsonl"
    line = json.loads(file.read_bytes())

    def signed(size: int, root: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.from_private_bytes((home / "audit-head" / "checkpoint.key").read_bytes())
        text = note.Checkpoint(line["origin"], size, root).text
        made = note.Note(text, (note.sign(text, line["origin"], key),))
        file.write_bytes(json.dumps({"note": made.raw.decode()}).encode() + b"\n")

    for size, root, kind in ((5, b"x" * 32, "checkpoint_mismatch"), (99, b"x" * 32, "checkpoint_mismatch")):
        signed(size, root)
        result = call("verify", "--json")
        assert result.exit_code == 3
        assert kind in {one.split(":")[0] for one in json.loads(result.stdout)["report"]["failures"]}
    file.write_bytes(json.dumps({**line, "note": line["note"].replace("\n5\n", "\n4\n")}).encode() + b"\n")
    assert "checkpoint_invalid" in call("verify", "--json").stdout


def failures() -> list[str]:
    """The kinds of failures of ``covenant audit verify``, whose exit status fits them."""
    result = call("verify", "--json")
    found = [one.split(":")[0] for one in json.loads(result.stdout)["report"]["failures"]]
    assert result.exit_code == (3 if found else 0)
    return found


def test_removed_checkpoints_are_named(home: Path) -> None:
    fill(home, 3)
    fill(home, 2)
    file = home / "audit" / "checkpoints.jsonl"
    whole = file.read_bytes()
    first, second = whole.splitlines(keepends=True)
    for left, missing in ((None, 2), (b"", 2), (first, 1), (second, 1), (first + second[:-1], 1), (whole[:40], 2)):
        file.unlink(missing_ok=True)
        if left is not None:
            file.write_bytes(left)
        assert failures() == ["checkpoint_missing"] * missing, left
        message = call("verify").stdout
        assert "`checkpoints.jsonl` has none: put back a copy of the file" in message
    # What the message says to do.
    file.write_bytes(whole)
    assert failures() == []


def test_removed_checkpoints_stay_named_after_start(home: Path) -> None:
    fill(home, 3)
    file = home / "audit" / "checkpoints.jsonl"
    file.unlink()
    fill(home, 1)  # a start, and a checkpoint of its own
    assert failures() == ["checkpoint_missing"]


def test_home_without_checkpoint_lacks_none(home: Path) -> None:
    fill(home, 3, signed=False)
    (home / "audit" / "checkpoints.jsonl").unlink(missing_ok=True)
    assert failures() == []


def test_removed_cosignature_is_named(home: Path, tmp_path: Path) -> None:
    fill(home, 3)
    file = home / "audit" / "checkpoints.jsonl"
    plain = file.read_bytes()
    vkey = str(home / "audit-head" / "checkpoint.vkey")
    be = ["cosign", "--key", str(tmp_path / "key"), "--name", "w", "--log", vkey]
    made = call(*be, stdin=works("checkpoint", "--old", "0"))
    witness = made.stderr.removeprefix("witness key: ").strip()
    works("cosigned", "--witness", witness, stdin=made.stdout)
    cosigned = file.read_bytes()
    assert failures() == []
    file.write_bytes(plain)
    assert failures() == ["checkpoint_missing"]
    assert "a witness cosigned 3 rows" in call("verify").stdout
    file.unlink()
    assert failures() == ["checkpoint_missing"] * 2
    file.write_bytes(cosigned)
    assert failures() == []


def test_cut_leaves_row_of_newest_checkpoint(daemon: Path) -> None:
    fill(daemon, 3)
    assert json.loads(works("purge", "--before-ms", str(server_kit.NOW_MS + 1), "--json"))["purged"] > 3
    assert failures() == []
    (daemon / "audit" / "checkpoints.jsonl").unlink()
    assert failures() == ["checkpoint_missing"]


@pytest.mark.parametrize("cut", [False, True], ids=["control: no cut", "after a cut"])
def test_removed_cosignature_of_newest_is_named(daemon: Path, tmp_path: Path, cut: bool) -> None:
    fill(daemon, 3)
    file, vkey = daemon / "audit" / "checkpoints.jsonl", str(daemon / "audit-head" / "checkpoint.vkey")
    newest = json.loads(file.read_bytes().splitlines()[-1])["note"]
    made = call("cosign", "--key", str(tmp_path / "key"), "--name", "w", "--log", vkey, stdin=newest)
    works("cosigned", "--witness", made.stderr.removeprefix("witness key: ").strip(), stdin=made.stdout)
    lines = file.read_bytes().splitlines(keepends=True)
    assert b"w " in lines[-1]
    if cut:
        purged = json.loads(works("purge", "--before-ms", str(server_kit.NOW_MS + 1), "--json"))["purged"]
        assert purged > 3
    assert failures() == []
    file.write_bytes(b"".join(one for one in file.read_bytes().splitlines(keepends=True) if one != lines[-1]))
    assert failures() == ["checkpoint_missing"]


NO_CHECKPOINTS = {"no JSON": b"garbage\n", "nested deeply": b'{"note":' + b"[" * 5000 + b"]" * 5000 + b"}\n"}


@pytest.mark.parametrize("line", NO_CHECKPOINTS.values(), ids=NO_CHECKPOINTS)
def test_line_no_checkpoint_is_named(home: Path, line: bytes) -> None:
    fill(home, 3)
    file = home / "audit" / "checkpoints.jsonl"
    file.write_bytes(file.read_bytes() + line)
    assert failures() == ["checkpoint_invalid"]
    with pytest.raises(errors.NoteError):
        checkpoints.Notary("origin", None).load(line)  # type: ignore[arg-type]


def test_newest_checkpoint_is_printed_without_daemon(home: Path) -> None:
    fill(home, 3)
    printed = note.Note.parse(works("checkpoint").encode())
    key = note.Verifier.parse((home / "audit-head" / "checkpoint.vkey").read_text())
    printed.verified([key])
    assert note.Checkpoint.parse(printed.text).size == 3


def test_log_without_checkpoint_says_so(home: Path) -> None:
    fill(home, 1, signed=False)
    assert isinstance(call("checkpoint").exception, errors.UsageError)


def test_with_daemon_checkpoint_covers_newest_row(daemon: Path) -> None:
    fill(daemon, 3)
    size = note.Checkpoint.parse(note.Note.parse(works("checkpoint").encode()).text).size
    # The three, and the row about the checkpoint of three.
    assert size == 4


def test_proof_is_shown_and_checked(daemon: Path) -> None:
    ids = fill(daemon, 3)
    assert works("prove", ids[1]).startswith("row 1 of 3, root ")
    assert json.loads(works("prove", ids[1], "--json"))["proof"]["event_id"] == ids[1]
    for words, shown in ((("nothing",), ""), (("nothing", "--json"), '{"kind": "audit_inclusion", "proof": null}\n')):
        absent = call("prove", *words)
        assert (absent.exit_code, absent.stdout) == (3, shown)


# Witnesses -------------------------------------------------------------------------------------------------------


def test_witness_follows_log_and_its_cosignatures_are_kept(home: Path, tmp_path: Path) -> None:
    fill(home, 3)
    key, vkey = tmp_path / "witness.key", str(home / "audit-head" / "checkpoint.vkey")
    be = ["cosign", "--key", str(key), "--name", "witness.example/w1", "--log", vkey]
    first = call(*be, stdin=works("checkpoint", "--old", "0"))
    assert first.exception is None, first.exception
    witness = first.stderr.removeprefix("witness key: ").strip()
    kept = note.Note.parse(works("cosigned", "--witness", witness, stdin=first.stdout).encode())
    assert len(kept.verified([note.Verifier.parse(witness)])) == 1
    fill(home, 2)
    size = note.Checkpoint.parse(kept.text).size
    second = works(*be, stdin=works("checkpoint", "--old", str(size)))
    assert second.startswith("\u2014 witness.example/w1 ")
    assert json.loads(works("verify", "--json"))["report"]["valid"]
    kinds = [row["kind"]["type"] for row in json.loads(works("recent", "--extended", "--json"))["events"]]
    assert "audit_checkpoint_cosigned" in kinds


def test_running_daemon_keeps_cosignatures_for_its_operator(daemon: Path, tmp_path: Path) -> None:
    fill(daemon, 3)
    vkey = str(daemon / "audit-head" / "checkpoint.vkey")
    made = {}
    for name in ("one", "two"):
        shown = call("cosign", "--key", str(tmp_path / name), "--name", name, "--log", vkey, stdin=works("checkpoint"))
        made[name] = (shown.stderr.removeprefix("witness key: ").strip(), shown.stdout)
        # Rows come all the while, and other checkpoints with them.
        fill(daemon, 2)
    for name, (witness, lines) in made.items():
        kept = note.Note.parse(works("cosigned", "--witness", witness, stdin=lines).encode())
        assert [one.verifier.name for one in kept.verified([note.Verifier.parse(witness)])] == [name]
    rows = [row["kind"] for row in json.loads(works("recent", "--extended", "--json"))["events"]]
    assert sum(row["type"] == "audit_checkpoint_cosigned" for row in rows) == 2
    assert json.loads(works("verify", "--json"))["report"]["valid"]
    refused = call("cosigned", "--witness", made["one"][0], stdin=made["two"][1])
    assert isinstance(refused.exception, errors.NoteError)


def test_witness_signs_no_other_history(home: Path, tmp_path: Path) -> None:
    fill(home, 3)
    key, vkey = tmp_path / "witness.key", str(home / "audit-head" / "checkpoint.vkey")
    be = ["cosign", "--key", str(key), "--name", "w", "--log", vkey]
    request = works("checkpoint", "--old", "0")
    works(*be, stdin=request)
    again = call(*be, stdin=request)
    assert isinstance(again.exception, errors.NoteError)
    assert "cosigned 3 rows last" in again.exception.message
    fill(home, 2)
    good = works("checkpoint", "--old", "3")
    lines = good.split("\n")
    for broken in ("\n".join([lines[0], *lines[2:]]), good.replace("old 3", "old 4"), good.split("\n\n", 1)[1]):
        assert isinstance(call(*be, stdin=broken).exception, errors.NoteError)
    seen = json.loads((tmp_path / "witness.key.seen").read_text())
    assert [one["size"] for one in seen.values()] == [3]
    works(*be, stdin=good)


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", '{"x": {"size": "3", "root_hex": ""}}', '{"x": {"size": 3}}', '{"x": 1}']
)
def test_witness_that_cannot_know_what_it_saw_signs_nothing(home: Path, tmp_path: Path, damage: str) -> None:
    fill(home, 3)
    key = tmp_path / "witness.key"
    be = ["cosign", "--key", str(key), "--name", "w", "--log", str(home / "audit-head" / "checkpoint.vkey")]
    seen = tmp_path / "witness.key.seen"
    seen.write_text(damage)
    refused = call(*be, stdin=works("checkpoint", "--old", "0"))
    assert isinstance(refused.exception, errors.NoteError)
    assert refused.exception.where == str(seen)
    assert seen.read_text() == damage


def test_what_witness_saw_is_on_disk_before_it_signs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home, 3)
    request = works("checkpoint", "--old", "0")
    synced: list[str] = []
    real = os.fsync

    def sync(fd: int) -> None:
        real(fd)
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path)))

    signed: list[list[str]] = []
    cosign = note.cosign

    def signs(*given: Any) -> Any:
        signed.append(list(synced))
        return cosign(*given)

    monkeypatch.setattr(note, "cosign", signs)
    monkeypatch.setattr(os, "fsync", sync)
    key, vkey = tmp_path / "w.key", str(home / "audit-head" / "checkpoint.vkey")
    works("cosign", "--key", str(key), "--name", "w", "--log", vkey, stdin=request)
    # Each file under the name that it has until it is whole, and then the folder with the name that it got.
    making = [".w.key.new", ".w.key.seen.new"]
    assert signed == [[making[0], ".", making[1], "."]]


def test_two_who_cosign_with_one_key_take_turns(home: Path, tmp_path: Path) -> None:
    fill(home, 3)
    key, lock = tmp_path / "w.key", tmp_path / "w.key.lock"
    vkey = home / "audit-head" / "checkpoint.vkey"
    be = ["cosign", "--key", str(key), "--name", "w", "--log", str(vkey)]
    request = works("checkpoint", "--old", "0")
    origin = note.Checkpoint.parse(note.Note.parse(request.split("\n\n", 1)[1].encode()).text).origin
    with lock.open("wb") as held:
        assert atomic_file.take(held.fileno(), 0)
        command = [sys.executable, "-m", "covenant", "audit", *be]
        given = tmp_path / "request"
        given.write_text(request)
        with (
            given.open("rb") as stdin,
            subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as late,
        ):
            try:
                until = time.monotonic() + 300
                while not _has_open(late.pid, lock):
                    assert late.poll() is None, late.communicate()
                    assert time.monotonic() < until
                    time.sleep(0.01)
                # Another history of the same length, which the one that holds the lock signs.
                seen = json.dumps({origin: {"size": 3, "root_hex": "00" * 32}})
                key.with_name("w.key.seen").write_text(seen)
            finally:
                fcntl.flock(held, fcntl.LOCK_UN)
            out, err = late.communicate(timeout=300)
    assert (out, late.returncode) == ("", 1)
    assert "this witness cosigned 3 rows last, not 0" in err
    assert key.with_name("w.key.seen").read_text() == seen


def _has_open(pid: int, path: Path) -> bool:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        # One that was closed meanwhile is not it.
        with contextlib.suppress(FileNotFoundError):
            if fd.readlink() == path:
                return True
    return False


def test_cosignature_of_stranger_is_not_kept(home: Path, tmp_path: Path) -> None:
    fill(home, 3)
    vkey = str(home / "audit-head" / "checkpoint.vkey")
    made = {}
    for name in ("one", "two"):
        result = call("cosign", "--key", str(tmp_path / name), "--name", name, "--log", vkey, stdin=works("checkpoint"))
        made[name] = (result.stderr.removeprefix("witness key: ").strip(), result.stdout)
    refused = call("cosigned", "--witness", made["one"][0], stdin=made["two"][1])
    assert isinstance(refused.exception, errors.NoteError)


# Cuts ------------------------------------------------------------------------------------------------------------


def test_purge_is_daemons(daemon: Path) -> None:
    fill(daemon, 3)
    assert works("purge", "--before-ms", str(server_kit.NOW_MS)) == "0 rows cut\n"
    assert json.loads(works("purge", "--before-ms", str(server_kit.NOW_MS + 1), "--json"))["purged"] == 7
    shown = works("recent")
    assert "audit_rebased" in shown
    assert json.loads(works("verify", "--json"))["report"]["valid"]


@pytest.mark.parametrize("arguments", [[], ["--before-ms", "1", "--older-than-ms", "1"]])
def test_purge_needs_one_time(home: Path, arguments: list[str]) -> None:
    assert isinstance(call("purge", *arguments).exception, errors.UsageError)


def test_without_daemon_purge_is_refused(home: Path) -> None:
    fill(home, 1)
    assert isinstance(call("purge", "--before-ms", "1").exception, errors.DaemonSilentError)
