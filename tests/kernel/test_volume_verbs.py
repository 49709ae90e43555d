"""The verbs of volumes as typed, with their rows; and what each refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click.testing
import pytest

from covenant.cli import main
from policy import errors
from sandbox.volumes import image
from sandbox.volumes.store import VolumeStore
from tests.kernel import volume_kit as kit
from tests.kernel.world import World


@pytest.fixture
def store(tmp_path: Path) -> VolumeStore:
    return VolumeStore(tmp_path)


def typed(world: World, *words: str, status: int = 0) -> Any:
    runner = click.testing.CliRunner(env={"COVENANT_HOME": str(world.home)})
    done = runner.invoke(main.cli, ["volume", *words, "--json"], standalone_mode=True)
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def test_each_verb_writes_one_row(world: World) -> None:
    assert typed(world, "create", "data", "--size", "16M", "--owner", "1000")["mb"] == 16
    typed(world, "snapshot", "data", "one")
    typed(world, "resize", "data", "--size", "24M")
    assert typed(world, "show", "data")["snapshots"][0]["name"] == "one"
    assert typed(world, "restore", "data", "one")["mb"] == 16
    typed(world, "rm", "data", "one")
    assert [one["name"] for one in typed(world, "list")["volumes"]] == ["data"]
    typed(world, "rm", "data")
    assert typed(world, "list")["volumes"] == []
    rows = [row["kind"] for row in world.rows() if row["kind"]["type"] == "volume_changed"]
    told = [(row["act"], row["name"], row["owner"], row["mb"], row["snapshot"]) for row in rows]
    assert told == [
        ("created", "data", 1000, 16, None),
        ("snapshot", "data", 1000, 16, "one"),
        ("resized", "data", 1000, 24, None),
        ("restored", "data", 1000, 16, "one"),
        ("snapshot_removed", "data", 1000, 16, "one"),
        ("removed", "data", 1000, 16, None),
    ]


@pytest.mark.parametrize("size", ["0M", "1", "1K", "1.5G", "-1G", "1G ", "G"])
def test_other_sizes_are_usage_errors(world: World, size: str) -> None:
    runner = click.testing.CliRunner(env={"COVENANT_HOME": str(world.home)})
    assert runner.invoke(main.cli, ["volume", "create", "data", "--size", size]).exit_code == 2


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "A", "-a", "a" * 33, "a.b", "ä", "a\n", ".making.a"])
def test_names_that_are_paths_are_refused(store: VolumeStore, name: str) -> None:
    for verb in (
        lambda: store.create(name, 16, 0, pytest.fail, now_ms=1),
        lambda: store.remove(name, pytest.fail),
        lambda: store.find(name),
        lambda: store.snapshot(name, "one", pytest.fail),
    ):
        with pytest.raises(errors.VolumeError, match="is no name of a volume"):
            verb()


def test_names_of_snapshots_are_checked(tmp_path: Path, store: VolumeStore) -> None:
    kit.created(tmp_path)
    for name in ("../../x", ".data", "A"):
        for verb in (store.snapshot, store.restore, store.remove_snapshot):
            with pytest.raises(errors.VolumeError, match="is no name of a volume"):
                verb("data", name, pytest.fail)


def test_what_is_not_there_is_refused_with_its_fix(tmp_path: Path, store: VolumeStore) -> None:
    with pytest.raises(errors.VolumeError) as e:
        store.resize("data", 16, pytest.fail)
    assert e.value.hint == "covenant volume create data --size 1G"
    kit.created(tmp_path)
    for verb in (store.restore, store.remove_snapshot):
        with pytest.raises(errors.VolumeError, match="has no snapshot `one`"):
            verb("data", "one", pytest.fail)
    with pytest.raises(errors.VolumeError, match="there is a volume `data` already"):
        kit.created(tmp_path)
    store.snapshot("data", "one", lambda: None)
    with pytest.raises(errors.VolumeError, match="has a snapshot `one` already"):
        store.snapshot("data", "one", pytest.fail)


def test_smaller_than_its_files_is_refused(tmp_path: Path, store: VolumeStore) -> None:
    volume = kit.created(tmp_path, mb=32)
    with kit.opened(volume) as top:
        Path(f"{top}/large").write_bytes(os.urandom(20 << 20))
    before = kit.content(volume)
    with pytest.raises(errors.VolumeError, match="resize2fs failed") as e:
        store.resize("data", 16, pytest.fail)
    assert e.value.hint == "remove files of the volume, or take a larger size"
    assert volume.mb == 32
    assert kit.content(volume) == before
    assert store.resize("data", 64, lambda: None).mb == 64
    assert kit.content(volume) == before


def test_size_beyond_the_disk_is_refused(tmp_path: Path, store: VolumeStore) -> None:
    system = os.statvfs(tmp_path)
    beyond = min(system.f_bavail * system.f_frsize // image.MIB + 1, 16 * 1024 * 1024)
    with pytest.raises(errors.VolumeError, match=r"has less than .* of free space"):
        store.create("data", beyond, 0, pytest.fail, now_ms=1)
    assert store.listed() == []


def test_row_that_cannot_be_written_changes_nothing(tmp_path: Path, store: VolumeStore) -> None:
    volume = kit.created(tmp_path)
    with kit.opened(volume) as top:
        Path(f"{top}/x").write_text("x")
    store.snapshot("data", "one", lambda: None)
    before = kit.content(volume), volume.mb, volume.snapshots()

    def full() -> None:
        raise errors.LedgerError("no room")

    for verb in (
        lambda: store.create("new", 16, 0, full, now_ms=1),
        lambda: store.remove("data", full),
        lambda: store.resize("data", 24, full),
        lambda: store.restore("data", "one", full),
        lambda: store.snapshot("data", "two", full),
        lambda: store.remove_snapshot("data", "one", full),
    ):
        with pytest.raises(errors.LedgerError):
            verb()
        assert [one.name for one in store.listed()] == ["data"]
        assert (kit.content(volume), volume.mb, volume.snapshots()) == before
    assert sorted(one.name for one in (tmp_path / "volumes").iterdir()) == [".lock", "data"]


def test_new_volume_is_empty_and_whole(tmp_path: Path, store: VolumeStore) -> None:
    volume = kit.created(tmp_path)
    with kit.opened(volume) as top:
        assert list(Path(f"{top}/").iterdir()) == []
    assert volume.image.stat().st_blocks * 512 >= kit.MB * image.MIB
    assert oct(volume.image.stat().st_mode & 0o777) == "0o600"
    assert kit.attached_below(tmp_path) == []
