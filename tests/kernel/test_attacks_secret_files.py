"""Attacks on secrets as files and on where they come from: a revocation in between, a vault that is late, full size."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from policy import errors
from policy.signing import envelope as envelopes
from sandbox.broker.vault_process import Fetcher
from sandbox.kernel.fs import secret_files
from sandbox.kernel.proc import spawn as proc_spawn
from sandbox.kernel.proc.secret_memory import Locked
from sandbox.vault.backend import MAX_VALUE_BYTES, Backend, OpenedSecret
from tests.kernel import serving
from tests.kernel.families import BIG, SMALL, member, spawn
from tests.kernel.live_runs import until
from tests.kernel.test_credential_files import FILES, _with_vault
from tests.kernel.test_credentials import vault
from tests.kernel.test_revocation_races import ANSWERS, LEAKS, Revoking
from tests.kernel.test_spawn_served import _running
from tests.kernel.world import World

pytestmark = pytest.mark.kernel


@pytest.fixture
def keyed(world: World) -> World:
    _with_vault(world)
    vault(world, "init")
    vault(world, "put", "probe", "db", secret="a secret")
    return world


def test_what_is_revoked_while_vault_is_asked_is_not_started(keyed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revocation waits some seconds for shims that are about to start their runs; a vault may take longer."""
    package = keyed.sign(keyed.package({"main.py": ANSWERS}, more=FILES))
    signed = envelopes.decode((package / "agent.dsse.json").read_bytes())
    operator = Revoking(keyed, hashlib.sha256(signed.payload).hexdigest())
    seal = secret_files.SecretFiles.seal

    def revoke_then_seal(self: secret_files.SecretFiles) -> None:
        operator.begun()
        seal(self)

    monkeypatch.setattr(secret_files.SecretFiles, "seal", revoke_then_seal)
    monkeypatch.setattr(proc_spawn, "spawn", lambda *launch: pytest.fail("it was started"))
    with pytest.raises(errors.RunRevokedError, match=LEAKS):
        keyed.run(package)
    operator.join()
    assert operator.enforced.failed == ()


def test_nobody_revokes_it_and_it_runs(keyed: World) -> None:
    """The control."""
    answer = keyed.run(keyed.sign(keyed.package({"main.py": ANSWERS}, more=FILES)))
    assert answer.error is None
    assert answer.result is not None


class Late:
    """Answers with the name that it was asked for; ``slow`` in its own time."""

    name = "late"

    @contextlib.contextmanager
    def opened(self, agent_id: str, name: str) -> Iterator[OpenedSecret | None]:
        if not name:
            yield None
            return
        if name == "slow":
            time.sleep(2)
        with Locked(len(name)) as value:
            value.view[:] = name.encode()
            yield OpenedSecret(1, value)


def test_late_answer_is_no_answer_to_next_question() -> None:
    said: list[str] = []

    def heard(found: OpenedSecret | errors.VaultError | None) -> None:
        said.append(bytes(found.value.view).decode() if isinstance(found, OpenedSecret) else type(found).__name__)

    with Fetcher(lambda: cast("Backend", Late()), "a", seconds=1) as fetcher:
        fetcher.ask("a", "fast", heard)
        fetcher.settle({})
        assert said == ["fast"]  # the control
        fetcher.ask("a", "slow", heard)
        fetcher.settle({})
        time.sleep(1.5)  # its answer has come by now
        fetcher.ask("a", "other", heard)
        fetcher.settle({})
    assert said == ["fast", "VaultError", "VaultError"]


def test_as_many_and_as_large_as_manifest_can_grant_fit() -> None:
    value = memoryview(bytes(MAX_VALUE_BYTES))
    with secret_files.SecretFiles(64_321) as made:
        for number in range(256):
            made.put(f"{number:0128d}", value)
        made.seal()
        assert len(list(Path(f"/proc/self/fd/{made.fd}").iterdir())) == 256


def test_no_child_and_no_process_beside_run_holds_what_holds_its_secrets(warm: Path) -> None:
    """A child's keeper is forked while its parent's holds the file system; a gate would be started beside it."""
    with serving.open_place() as base:
        world = World(base, warm=warm)
        served = serving.Served(world)
        _with_vault(world)
        vault(world, "init")
        vault(world, "put", "holds", "db", secret="a secret")
        member(world, "slow", "import time\ntime.sleep(600)", **SMALL)
        path = member(world, "holds", "answer = child('slow')", more=spawn() + FILES, **BIG)
        with served, serving.asked(served.path, path):
            live = until(lambda: _running(world, {"holds", "slow"}))
            ours, childs = live["holds"].keeper, live["slow"].keeper
            until(lambda: "/run/credentials" in _places(ours))
            (device,) = {line.split()[2] for pid in _below(ours) for line in _mounts(pid) if _PLACE in line}
            until(lambda: len(_below(childs)) >= 2)
            holders = {pid for pid in _everybody() if device in _devices(pid)}
            assert ours in holders  # the control
            assert holders & {childs, *_below(childs), served.pid} == set()
            assert holders <= {ours, *_below(ours)}
            assert _PLACE not in _places(childs)


_PLACE = " /run/credentials "


def _everybody() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _below(pid: int) -> set[int]:
    """The processes that descend from this one, whichever of its threads began them."""
    parents: dict[int, int] = {}
    for one in _everybody():
        with contextlib.suppress(OSError):
            parents[one] = int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {one for one, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def _mounts(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return []


def _places(pid: int) -> str:
    return "\n".join(line for one in _below(pid) for line in _mounts(one))


def _devices(pid: int) -> set[str]:
    """The devices of what a process has open, as mountinfo writes them."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                info = os.stat(f"/proc/{pid}/fd/{fd}")
                found.add(f"{os.major(info.st_dev)}:{os.minor(info.st_dev)}")
    return found
