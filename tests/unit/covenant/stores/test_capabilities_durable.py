"""Grants on the disk: what a restart, a crash and version 1 leave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from covenant.keys.identity import Domain, verifies
from covenant.stores.capabilities import rows
from covenant.stores.capabilities.durable import DurableCapabilities
from policy import base58, errors
from tests.capability_kit import ADA, BOB, DAEMON, EVE, granted, narrowed

pytestmark = pytest.mark.anyio

ECHO = "tool.call.echo"
ROOT = Path(__file__).resolve().parents[4]

# Uses a metered grant from several tasks, saying what was counted once it was told so.
USER = """
import anyio, pathlib, sys
from covenant.keys.identity import Identity
from covenant.stores.capabilities.durable import DurableCapabilities

async def main():
    store = await DurableCapabilities.open(pathlib.Path(sys.argv[1]), Identity(b"d" * 32))
    async def use():
        for _ in range(100_000):
            (counted,) = await store.use([sys.argv[2]])
            print(counted.used, flush=True)
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(use)

anyio.run(main)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "capabilities"


async def reopened(place: Path) -> DurableCapabilities:
    return await DurableCapabilities.open(place, DAEMON)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def put(path: Path, *documents: object) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch(0o600)
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))


async def test_everything_is_there_after_restart(place: Path) -> None:
    store = await reopened(place)
    top, spent = granted(ADA, "memory.read"), granted(ADA, ECHO, {"version": 1, "max_uses": 2})
    child, gone = narrowed(top, BOB, by="ada", tiers=["working"]), narrowed(top, EVE)
    for signed in (top, spent, child, gone):
        await store.grant(signed, 10)
    await store.use([spent.signature])
    await store.revoke(gone.signature, 20)
    await store.close()
    for _ in range(2):
        store = await reopened(place)
        assert store.recovered == []
        assert store.find(BOB.pubkey, "memory.read", 30) == child
        assert store.find(EVE.pubkey, "memory.read", 30) is None
        assert [one.used for one in store.usage(1, ADA.pubkey)] == [1]
        assert [one.signature for one in store.recent(9, ADA.pubkey)] == [
            child.signature,
            spent.signature,
            top.signature,
        ]
        await store.close()
    store = await reopened(place)
    assert await store.purge(21, 30) == 1
    await store.close()
    assert len(lines(place / "granted.jsonl")) == 3
    assert lines(place / "revoked.jsonl") == []
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}


async def test_grant_of_as_many_values_as_its_bytes_hold_is_there_after_restart(place: Path) -> None:
    large = granted(ADA, "calendar.read", {"version": 1, "ids": [0] * 32_700})
    store = await reopened(place)
    await store.grant(large, 10)
    await store.close()
    store = await reopened(place)
    assert store.find(ADA.pubkey, "calendar.read", 30) == large
    await store.close()


async def test_revocation_bears_daemons_signature(place: Path) -> None:
    store = await reopened(place)
    signed = granted(ADA, "memory.read")
    await store.grant(signed, 10)
    await store.revoke(signed.signature, 20)
    await store.close()
    (row,) = lines(place / "revoked.jsonl")
    message = base58.decode(signed.signature, length=64) + (20).to_bytes(8) + (0).to_bytes(8)
    proof = base58.decode(str(row["revocation"]), length=64)
    assert verifies(DAEMON.agent.pubkey, Domain.CAPABILITY_REVOCATION, message, proof)
    assert not verifies(DAEMON.agent.pubkey, Domain.ATTESTATION, message, proof)


@pytest.mark.parametrize("how", ["taken back", "lost"])
async def test_what_hangs_from_grant_that_holds_no_more_holds_no_more(place: Path, how: str) -> None:
    """Also where the files say nothing of it: version 1's tombstone names one grant, and a line may be gone."""
    store = await reopened(place)
    top = granted(ADA, "memory.read")
    child = narrowed(top, BOB, by="ada", tiers=["working"])
    for signed in (top, child):
        await store.grant(signed, 10)
    await store.close()
    if how == "lost":
        put(place / "granted.jsonl", lines(place / "granted.jsonl")[1])
    else:
        put(place / "revoked.jsonl", {"signature": top.signature, "revoked_at": 20})
    store = await reopened(place)
    assert store.find(ADA.pubkey, "memory.read", 30) is None
    assert store.find(BOB.pubkey, "memory.read", 30) is None
    await store.close()


async def test_grant_made_anew_is_told_from_one_before(place: Path) -> None:
    signed = granted(ADA, "memory.read")
    store = await reopened(place)
    await store.grant(signed, 10)
    await store.revoke(signed.signature, 20)
    await store.grant(signed, 30)
    await store.close()
    store = await reopened(place)
    assert store.find(ADA.pubkey, "memory.read", 40) == signed
    await store.revoke(signed.signature, 50)
    await store.close()
    store = await reopened(place)
    assert store.find(ADA.pubkey, "memory.read", 60) is None
    await store.close()


async def test_version_1s_files_are_read_and_its_tombstones_signed(place: Path) -> None:
    held, gone = granted(ADA, "memory.read", ends=1000), granted(ADA, "memory.write")
    put(place / "granted.jsonl", *(json.loads(one.model_dump_json()) for one in (held, gone)))
    put(place / "revoked.jsonl", {"signature": gone.signature, "revoked_at": 5})
    store = await reopened(place)
    assert store.recovered == ["1 revocations of version 1 were signed"]
    assert store.find(ADA.pubkey, "memory.read", 9) == held
    assert store.find(ADA.pubkey, "memory.write", 9) is None
    await store.close()
    (row,) = (place / "revoked.jsonl").read_bytes().splitlines()
    tombstone = rows.read_revoked(row)
    assert (tombstone.signature, tombstone.revoked_at_ms) == (gone.signature, 5)
    assert tombstone.proven(DAEMON.agent.pubkey)
    store = await reopened(place)
    assert store.recovered == []
    await store.close()


async def test_what_was_written_into_files_grants_nothing(place: Path) -> None:
    forged = json.loads(granted(ADA, "memory.read").model_dump_json())
    forged["capability"]["action"] = "memory.write"
    twice = json.dumps(json.loads(granted(ADA, "a.b").model_dump_json())).replace(
        '"scope": {}', '"scope": {"version": 1}, "scope": {}'
    )
    put(place / "granted.jsonl", forged, {"no": "grant"})
    with (place / "granted.jsonl").open("a") as stream:
        stream.write(twice + "\n")
    (place / "uses.jsonl").touch(0o600)
    store = await reopened(place)
    assert store.find(ADA.pubkey, "memory.write", 0) is None
    assert store.find(ADA.pubkey, "a.b", 0) is None
    assert store.recovered == ["a line of `granted.jsonl` is no grant, and grants nothing"] * 2
    await store.close()


async def test_revocation_not_ours_counts_and_is_reported(place: Path) -> None:
    signed = granted(ADA, "memory.read")
    store = await reopened(place)
    await store.grant(signed, 10)
    await store.close()
    put(
        place / "revoked.jsonl",
        {"signature": signed.signature, "revoked_at": 5, "revocation": base58.encode(b"x" * 64)},
    )
    store = await reopened(place)
    assert store.recovered == ["1 revocations do not bear this daemon's signature; they count"]
    assert store.find(ADA.pubkey, "memory.read", 10) is None
    await store.close()


@pytest.mark.parametrize("name", ["revoked.jsonl", "uses.jsonl"])
async def test_what_takes_back_must_be_readable(place: Path, name: str) -> None:
    put(place / name, {"signature": 5})
    with pytest.raises(errors.StoreError):
        await reopened(place)


async def test_torn_line_was_never_granted(place: Path) -> None:
    store = await reopened(place)
    await store.grant(granted(ADA, "memory.read"), 10)
    await store.close()
    with (place / "granted.jsonl").open("ab") as stream:
        stream.write(b'{"capability": {"subject"')
    store = await reopened(place)
    assert len(store.recovered) == 1
    assert store.find(ADA.pubkey, "memory.read", 10) is not None
    await store.close()


async def test_uses_of_what_was_purged_do_not_count_again(place: Path) -> None:
    """A crash in the middle of a purge leaves uses and tombstones of grants that are gone."""
    signed = granted(ADA, ECHO, {"version": 1, "max_uses": 2})
    store = await reopened(place)
    await store.grant(signed, 10)
    await store.use([signed.signature])
    await store.revoke(signed.signature, 20)
    await store.close()
    (place / "granted.jsonl").write_bytes(b"")
    store = await reopened(place)
    assert lines(place / "uses.jsonl") == []
    await store.grant(signed, 30)
    assert [one.used for one in await store.use([signed.signature])] == [1]
    await store.close()
    store = await reopened(place)
    assert store.find(ADA.pubkey, ECHO, 40) == signed
    assert [one.used for one in store.usage(1, ADA.pubkey)] == [1]
    await store.close()


async def test_many_uses_are_one_line_after_restart(place: Path) -> None:
    signed = granted(ADA, ECHO, {"version": 1, "max_uses": 10_000})
    store = await reopened(place)
    await store.grant(signed, 10)
    await store.close()
    (place / "uses.jsonl").write_bytes((rows.used(signed.signature, 0) + b"\n") * 2000)
    store = await reopened(place)
    await store.use([signed.signature])
    await store.close()
    assert [row.get("used") for row in lines(place / "uses.jsonl")] == [2000, None]
    store = await reopened(place)
    assert [one.used for one in store.usage(1, ADA.pubkey)] == [2001]
    await store.close()


@pytest.mark.parametrize("told", [1, 40, 200])
async def test_no_use_that_was_told_is_forgotten_by_kill_9(place: Path, told: int) -> None:
    signed = granted(ADA, ECHO, {"version": 1, "max_uses": 1_000_000})
    store = await reopened(place)
    await store.grant(signed, 10)
    await store.close()
    command = [sys.executable, "-c", USER, str(place), signed.signature]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as user:
        assert user.stdout is not None
        seen = [int(user.stdout.readline()) for _ in range(told)]
        user.send_signal(signal.SIGKILL)
        seen += [int(line) for line in user.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
    assert len(set(seen)) == len(seen), "no use was told twice"
    store = await reopened(place)
    (grant,) = store.usage(1, ADA.pubkey)
    # Four tasks: at most one use each was counted and not told.
    assert max(seen) <= grant.used <= max(seen) + 4
    await store.close()
