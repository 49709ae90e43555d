"""Parts of run directories that the next run takes over: one run has each, and what it holds is not trusted."""

from __future__ import annotations

import multiprocessing
import uuid
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from policy import errors
from policy.compile import artefacts
from sandbox.rundir import directory, reuse
from sandbox.rundir.directory import RunDirectory
from sandbox.rundir.reuse import MOST, Spares
from sandbox.storage import artefact_reader

POLICY = artefacts.Artefacts({name: name.encode() * 3 for name in artefacts.NAMES})
CONFIG = b'{"of": "another run, and longer"}'


def run(base: Path, *, policy: artefacts.Artefacts = POLICY, config: bytes = b"{}") -> RunDirectory:
    """A run that gets as far as any."""
    spares = Spares(base / reuse.SPARE, policy.digest)
    with RunDirectory(base / "runs" / str(uuid.uuid4()), {"agent_id": "a"}, spares=spares) as one:
        one.write_config(config)
        one.targets(["dir", "", "file"])
        one.write_policy(policy)
        assert artefact_reader.read(one.path / directory.POLICY) == policy
        assert (one.bundle / "config.json").read_bytes() == config
        assert sorted(path.name for path in (one.bundle / "mounts").iterdir()) == ["0", "2"]
        assert list(one.rootfs.iterdir()) == list(one.trace.iterdir()) == list(one.runsc_root.iterdir()) == []
    return one


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path


def kept(base: Path) -> list[Path]:
    """What waits for the next run."""
    return sorted((base / reuse.SPARE).iterdir())


def inodes(path: Path) -> set[int]:
    return {one.stat().st_ino for one in path.rglob("*")}


def test_the_next_run_of_a_policy_has_the_files_of_the_last_and_its_own_content(base: Path) -> None:
    run(base, config=CONFIG)
    assert [path.name.split(".")[:2] for path in kept(base)] == [
        [POLICY.digest, part] for part in ("bundle", "place", "policy")
    ]
    before = inodes(base / reuse.SPARE)
    run(base)
    assert inodes(base / reuse.SPARE) - {path.stat().st_ino for path in kept(base)} == before - {
        path.stat().st_ino for path in kept(base)
    }
    assert [path.name for path in (base / "runs").iterdir()] == [".gate"]


def test_another_policy_takes_nothing(base: Path) -> None:
    run(base)
    other = artefacts.Artefacts({**POLICY.files, "gates.json": b"other"})
    run(base, policy=other)
    assert len(kept(base)) == 6


def test_a_copy_of_the_policy_that_was_changed_is_thrown_away(base: Path) -> None:
    def changed(place: Path) -> None:
        (place / "cgroup.json").write_bytes(b"{}")

    def missing(place: Path) -> None:
        (place / "gates.json").unlink()

    def more(place: Path) -> None:
        (place / "more").write_bytes(b"")

    for spoil in (changed, missing, more):
        run(base)
        spoil(next(path for path in kept(base) if ".policy." in path.name))
        run(base)


def test_a_bundle_with_other_places_is_refused(base: Path) -> None:
    run(base)
    mounts = next(path for path in kept(base) if ".bundle." in path.name) / "mounts"
    (mounts / "2").unlink()
    (mounts / "2").symlink_to("/etc")
    with pytest.raises(errors.KernelError, match="no file"):
        run(base)
    # Whatever failed, it is not kept: the next makes its own.
    run(base)
    (next(path for path in kept(base) if ".bundle." in path.name) / "mounts" / "7").mkdir()
    with pytest.raises(errors.KernelError, match="has not"):
        run(base)


def fails(base: Path) -> None:
    with RunDirectory(base / "runs" / "one", {}, spares=Spares(base / reuse.SPARE, POLICY.digest)) as one:
        one.write_policy(POLICY)
        raise RuntimeError


def test_a_run_that_failed_leaves_nothing(base: Path) -> None:
    with pytest.raises(RuntimeError):
        fails(base)
    # And neither does one that did not get as far as its policy.
    with RunDirectory(base / "runs" / "two", {}, spares=Spares(base / reuse.SPARE, POLICY.digest)):
        pass
    assert not (base / reuse.SPARE).exists()


def test_they_are_bounded_and_make_room_for_those_of_the_latest_policy(base: Path) -> None:
    for number in range(MOST):
        run(base, policy=artefacts.Artefacts({**POLICY.files, "gates.json": b"%d" % number}))
        assert len(kept(base)) <= MOST
    run(base)
    assert sum(path.name.startswith(POLICY.digest) for path in kept(base)) == 3
    assert len(kept(base)) == MOST
    reuse.sweep(base / reuse.SPARE)
    assert kept(base) == []
    reuse.sweep(base / "absent")


def _many(base: Path, sweeps: bool, said: SimpleQueue[str]) -> None:
    try:
        for _ in range(40):
            run(base)
            if sweeps:
                reuse.sweep(base / reuse.SPARE)
    except BaseException as e:
        said.put(repr(e))


def test_of_two_that_want_a_part_one_has_it(base: Path) -> None:
    fork = multiprocessing.get_context("fork")
    said: SimpleQueue[str] = fork.SimpleQueue()
    jobs = [fork.Process(target=_many, args=(base, sweeps, said)) for sweeps in (True, False) * 2]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert said.empty(), said.get()
    assert len(kept(base)) <= MOST + len(jobs)
