"""The registry on the disk: no token in it, version 1's migrated, and an operator who is never locked out."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from covenant.stores.journal import Journal
from covenant.stores.peers.durable import DurablePeers
from policy import base58, errors
from tests.capability_kit import ADA, BOB, DAEMON
from tests.server_kit import Clock

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[4]
ROTATOR = """
import anyio, pathlib, sys
from covenant.keys.identity import Identity
from covenant.stores.peers.durable import DurablePeers

async def main():
    peers = await DurablePeers.open(pathlib.Path(sys.argv[1]), Identity(b"d" * 32).agent, lambda: 1000)
    print("open", flush=True)
    while True:
        print((await peers.rotate_operator()).token, flush=True)

anyio.run(main)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "peers"


async def opened(place: Path, at_ms: int = 1000) -> DurablePeers:
    return await DurablePeers.open(place, DAEMON.agent, Clock(at_ms))


def token_of(place: Path) -> str:
    return (place / "operator.token").read_text()


def put(path: Path, text: str, mode: int = 0o600) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch()
    path.chmod(mode)
    path.write_text(text)


async def test_no_token_is_in_registry(place: Path) -> None:
    peers = await opened(place)
    ada = await peers.enroll(ADA, 5000)
    await peers.revoke((await peers.enroll(BOB, None)).entry)
    await peers.rotate_operator()
    await peers.close()
    text = (place / "registry.jsonl").read_text()
    for token in (ada.token, token_of(place)):
        assert token not in text
        assert token[:7] not in text
    assert (place / "operator.token").stat().st_mode & 0o777 == 0o600
    peers = await opened(place)
    assert peers.recovered == []
    found = await peers.authenticate(ada.token)
    assert found is not None
    assert (found.agent_id, found.expires_at) == (ADA, 5000)
    assert (await peers.authenticate(token_of(place))) is not None
    assert len(peers.listing(10, None, "revoked").entries) == 2
    await peers.close()


async def test_version_1s_registry_is_migrated_with_backup(place: Path) -> None:
    tokens = [base58.encode(bytes([n]) * 32) for n in (5, 6, 7)]
    rows = [
        {
            "type": "registered",
            "token": token,
            "agent_id": json.loads(agent.model_dump_json()),
            "registered_at": at,
        }
        for at, (token, agent) in enumerate(zip(tokens, (DAEMON.agent, ADA, BOB), strict=True))
    ]
    rows.append({"type": "revoked", "token": tokens[2], "revoked_at": 9})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    put(place / "registry.jsonl", text)
    put(place / "operator.token", tokens[0])
    # As a crash between the copy and the change would leave it.
    put(place / "registry.jsonl.v1-1", text)
    peers = await opened(place)
    assert len(peers.recovered) == 1
    assert "registry.jsonl.v1-1" in peers.recovered[0]
    assert not any(token in (place / "registry.jsonl").read_text() for token in tokens)
    assert (place / "registry.jsonl.v1-1").read_text() == text
    assert token_of(place) == tokens[0], "the operator's token works on"
    for token, agent in ((tokens[0], DAEMON.agent), (tokens[1], ADA)):
        found = await peers.authenticate(token)
        assert found is not None
        assert found.agent_id == agent
    assert await peers.authenticate(tokens[2]) is None
    await peers.close()
    peers = await opened(place)
    assert peers.recovered == []
    await peers.close()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o666])
async def test_token_that_others_can_read_or_write_refuses_start(place: Path, mode: int) -> None:
    await (await opened(place)).close()
    (place / "operator.token").chmod(mode)
    with pytest.raises(errors.OperatorTokenError):
        await opened(place)


async def test_symlink_refuses_start(place: Path, tmp_path: Path) -> None:
    await (await opened(place)).close()
    (place / "operator.token").rename(tmp_path / "elsewhere")
    (place / "operator.token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.OperatorTokenError):
        await opened(place)


@pytest.mark.parametrize("text", ["", "not a token", "\x00" * 40, base58.encode(b"planted".ljust(32, b"."))])
async def test_what_is_no_token_of_operator_is_made_anew(place: Path, text: str) -> None:
    peers = await opened(place)
    old = token_of(place)
    await peers.close()
    put(place / "operator.token", text)
    peers = await opened(place)
    assert token_of(place) not in {old, text}
    assert await peers.authenticate(text) is None
    assert await peers.authenticate(old) is None, "nobody but the file names the operator's token"
    assert await peers.authenticate(token_of(place)) is not None
    await peers.close()


async def test_another_elses_token_in_file_makes_nobody_operator(place: Path) -> None:
    peers = await opened(place)
    ada = await peers.enroll(ADA, None)
    await peers.close()
    put(place / "operator.token", ada.token)
    peers = await opened(place)
    found = await peers.authenticate(ada.token)
    assert found is not None
    assert found.agent_id == ADA
    assert token_of(place) != ada.token
    await peers.close()


async def test_line_that_cannot_be_read_refuses_start(place: Path) -> None:
    put(place / "registry.jsonl", '{"type":"registered","token_sha256":"00"}\n')
    with pytest.raises(errors.StoreError):
        await opened(place)


async def test_full_disk_leaves_old_token(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = await opened(place)
    old = token_of(place)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("sandbox.storage.atomic_file.replace", full)
        with pytest.raises(errors.StoreError):
            await peers.rotate_operator()
    assert token_of(place) == old
    assert await peers.authenticate(old) is not None
    assert len(peers.of(DAEMON.agent.pubkey)) == 1
    await peers.close()


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", ["register", "before the file", "after the file"])
async def test_after_crash_at_each_step_of_rotation(place: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    peers = await opened(place)
    old = token_of(place)
    append, write = Journal.append, DurablePeers._write_token
    seen = 0

    async def appending(self: Journal, line: bytes) -> None:
        nonlocal seen
        seen += 1
        if (seen, at) in {(1, "register"), (2, "after the file")}:
            raise Crash
        await append(self, line)

    def writing(self: DurablePeers, token: str) -> None:
        if at == "before the file":
            raise Crash
        write(self, token)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", appending)
        patch.setattr(DurablePeers, "_write_token", writing)
        with pytest.raises(Crash):
            await peers.rotate_operator()
    await peers.close()
    assert (token_of(place) == old) is (at != "after the file")
    peers = await opened(place)
    assert (await peers.authenticate(token_of(place))) is not None
    assert (await peers.authenticate(old) is not None) is (at != "after the file")
    assert len(peers.of(DAEMON.agent.pubkey)) == 1
    assert len(peers.recovered) == (at != "register")
    await peers.close()


@pytest.mark.parametrize("rotations", [0, 1, 2, 5, 9])
async def test_kill_9_while_it_rotates(place: Path, rotations: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ROTATOR, str(place)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as rotator:
        assert rotator.stdout is not None
        assert rotator.stdout.readline() == "open\n"
        told = [rotator.stdout.readline().strip() for _ in range(rotations)]
        rotator.send_signal(signal.SIGKILL)
        told += [line.strip() for line in rotator.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    peers = await opened(place)
    assert await peers.authenticate(token_of(place)) is not None
    # All that were told but the last are old; the last may have been followed by one that was not told.
    for token in told[:-1]:
        assert await peers.authenticate(token) is None
    assert len(peers.of(DAEMON.agent.pubkey)) == 1
    await peers.close()
