"""A volume in real runs: kept between them, bounded, of one writer, its owner's, and as attestation sees it."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.kernel import procfs
from sandbox.kernel.fs import loop_device
from sandbox.volumes import image
from sandbox.volumes.store import VolumeStore
from tests.kernel import volume_kit as kit
from tests.kernel.live_runs import live
from tests.kernel.test_attest import within
from tests.kernel.world import World

KEEP = """
answer = sorted(os.listdir("/data"))
open("/data/" + str(len(answer)), "w").write("x")
"""
TRIED = """
import stat
answer = {}
def tried(name, act):
    try: answer[name] = act() or "done"
    except OSError as e: answer[name] = e.errno
def program():
    with open("/data/program", "w") as file: file.write("#!/bin/true\\n")
    os.chmod("/data/program", 0o755)
def fill():
    with open("/data/full", "wb") as file:
        for n in range(64): file.write(bytes(1 << 20)), file.flush()
tried("program", program)
tried("run it", lambda: os.execv("/data/program", ["program"]))
tried("device", lambda: os.mknod("/data/device", stat.S_IFBLK | 0o666, os.makedev(7, 0)))
tried("owner", lambda: os.stat("/data/program").st_uid == os.getuid() and "mine")
tried("fill", fill)
answer["filled"] = os.stat("/data/full").st_size >> 20
os.unlink("/data/full")
"""


def gone(volume_image: Path) -> bool:
    until = time.monotonic() + 60
    while image.is_attached(volume_image) and time.monotonic() < until:
        time.sleep(0.02)
    return not image.is_attached(volume_image)


def test_files_outlive_runs_and_no_device_stays(world: World) -> None:
    volume = kit.created(world.state)
    assert kit.ask(world, KEEP, "data") == []
    assert kit.ask(world, KEEP, "data") == ["0"]
    assert gone(volume.image)
    assert set(kit.content(volume)) == {"0", "1"}


def test_volume_is_bounded_and_starts_no_program(world: World) -> None:
    kit.created(world.state)
    got = kit.ask(world, TRIED, "data")
    assert (got["program"], got["owner"], got["fill"]) == ("done", "mine", errno.ENOSPC)
    assert got["run it"] in (errno.EPERM, errno.EACCES)
    assert got["device"] == errno.EPERM
    assert 8 <= got["filled"] < kit.MB


def test_promised_room_is_taken_at_each_start(world: World) -> None:
    volume = kit.created(world.state)
    whole = volume.image.stat().st_blocks
    sparse = volume.image.with_name("sparse")
    subprocess.run(["cp", "--sparse=always", str(volume.image), str(sparse)], check=True)
    os.replace(sparse, volume.image)
    assert volume.image.stat().st_blocks < whole // 2, "control"
    assert kit.ask(world, KEEP, "data") == []
    assert volume.image.stat().st_blocks >= whole * 9 // 10


def test_second_run_is_refused_and_shared_runs_are_not(world: World) -> None:
    volume = kit.created(world.state)
    package: dict[str, Any] = {"filesystem": "host", "disk_mb": 128, "id": "holder"}
    with live(world, more=kit.grant("data"), **package) as one, pytest.raises(errors.PathInUseError) as e:
        kit.ask(world, KEEP, "data")
    assert f"run `{one.made.run_id}` writes `volume:data` now" in str(e.value)
    with live(world, more=kit.grant("data", shared=True), **package):
        assert kit.ask(world, KEEP, "data", shared=True) == []
        devices = [line for line in kit.attached_below(world.state) if str(volume.image) in line]
        assert len(devices) == 1, "one file system has one device"
    assert kit.ask(world, KEEP, "data") == ["0"]


def test_verbs_refuse_volume_in_use(world: World) -> None:
    kit.created(world.state)
    store = VolumeStore(world.state)
    verbs: list[Callable[[], object]] = [
        lambda: store.remove("data", pytest.fail),
        lambda: store.resize("data", 32, pytest.fail),
        lambda: store.snapshot("data", "one", pytest.fail),
    ]
    with live(world, more=kit.grant("data"), filesystem="host", disk_mb=128):
        for verb in verbs:
            with pytest.raises(errors.VolumeBusyError, match="a run uses it"):
                verb()
    kept: list[str] = []
    store.snapshot("data", "one", lambda: kept.append("row"))
    assert kept == ["row"], "control"


def test_volume_of_another_uid_is_as_if_not_there(world: World) -> None:
    kit.created(world.state, owner=1000)
    package = world.sign(
        world.package({"main.py": "pass"}, filesystem="host", disk_mb=128, more=kit.grant("data", "none"))
    )
    for uid, names in ((1001, "data"), (1000, "none")):
        with pytest.raises(errors.NotEnforceableError) as e:
            world.run(package, uid=uid)
        assert e.value.hint == f"covenant volume create {names} --size 1G"
    assert kit.ask(world, KEEP, "data", request={"uid": 1000}) == []
    assert kit.ask(world, KEEP, "data") == ["0"]


def test_damaged_volume_is_refused_and_snapshot_mends_it(world: World) -> None:
    volume = kit.created(world.state)
    store = VolumeStore(world.state)
    assert kit.ask(world, KEEP, "data") == []
    store.snapshot("data", "one", lambda: None)
    kit.damage(volume)
    # As after a power failure: the state of the file system says that it was in use.
    subprocess.run(["debugfs", "-w", "-R", "ssv state 0", str(volume.image)], check=True, capture_output=True)
    with pytest.raises(errors.VolumeError, match="e2fsck failed: UNEXPECTED INCONSISTENCY") as e:
        kit.ask(world, KEEP, "data")
    assert e.value.hint == "restore a snapshot: covenant volume restore NAME SNAPSHOT"
    store.restore("data", "one", lambda: None)
    assert kit.ask(world, KEEP, "data") == ["0"]


def test_image_that_is_no_volume_is_refused(world: World, tmp_path: Path) -> None:
    """The fix puts the volume's own image back."""
    volume = kit.created(world.state)
    store = VolumeStore(world.state)
    store.snapshot("data", "one", lambda: None)
    other = tmp_path / "other"
    image.make(other, kit.MB)
    own = volume.image.with_name("own")
    os.rename(volume.image, own)
    volume.image.symlink_to(other)
    with pytest.raises(errors.VolumeError, match="`data` cannot be mounted: Too many levels of symbolic links"):
        kit.ask(world, KEEP, "data")
    volume.image.unlink()
    volume.image.write_bytes(b"\xe2\xe1\xf5\xe0" * (kit.MB << 18))
    with pytest.raises(errors.VolumeError, match=r"e2fsck failed: .*Bad magic number") as e:
        kit.ask(world, KEEP, "data")
    assert e.value.hint == "restore a snapshot: covenant volume restore NAME SNAPSHOT"
    store.restore("data", "one", lambda: None)
    assert kit.ask(world, KEEP, "data") == []
    assert gone(volume.image)
    record = volume.path / "record.json"
    before = record.read_bytes()
    record.write_text("{")
    with pytest.raises(errors.VolumeError, match="`data` is damaged"):
        kit.ask(world, KEEP, "data")
    record.write_bytes(before)
    assert kit.ask(world, KEEP, "data") == ["0"], "control"


def test_workspace_may_be_a_volume(world: World) -> None:
    kit.created(world.state, "own")
    more = '[workspace]\nmode = "volume"\nvolume = "own"\npath = "/work"\n'
    code = KEEP.replace("/data", "/work")
    fields = {"filesystem": "host", "disk_mb": 128, "more": more}
    assert world.ask(code, **fields) == []
    assert world.ask(code, **fields) == ["0"]


@pytest.mark.parametrize("programs", ["", 'exec = true\n[permissions.executables]\nallow = ["workspace"]\n'])
def test_workspace_volume_is_read_back(world: World, programs: str) -> None:
    """Its host mount has no noexec, so that native modules load; its guest mount has it unless programs are granted."""
    kit.created(world.state, "own")
    more = f'[workspace]\nmode = "volume"\nvolume = "own"\n{programs}'
    with live(world, more=more, filesystem="host", disk_mb=128) as one:
        report = one.report()
        assert report.holds, [layer for layer in report.layers if not layer.holds]
        (place,) = [mount for mount in procfs.mounts(one.family().gofer.name.pid) if mount.place == "/work"]
        assert "noexec" not in place.options
        assert {"nosuid", "nodev", "nosymfollow", "idmapped"} <= set(place.options)


def test_hand_made_changes_are_drift(world: World, tmp_path: Path) -> None:
    volume = kit.created(world.state)
    world.configure(attest_seconds=3600, on_drift="alarm")
    other = tmp_path / "other.ext4"
    image.make(other, 8)
    with live(world, more=kit.grant("data"), filesystem="host", disk_mb=128) as one:
        assert one.report().holds, "control"
        gofer = one.family().gofer.name.pid
        renamed = volume.image.with_name("x")
        os.rename(volume.image, renamed)
        os.link(other, volume.image)
        found = [layer for layer in one.report().layers if not layer.holds]
        assert [layer.name for layer in found] == ["mounts"]
        assert "at /data the image" in found[0].expected
        os.replace(renamed, volume.image)
        assert one.report().holds, "control: it is as it was"
        within(gofer, "libc.mount('none', '/data', 'tmpfs')")
        assert [layer.name for layer in one.report().layers if not layer.holds] == ["mounts"]


def test_image_has_one_device_however_often_mounted(tmp_path: Path) -> None:
    path = tmp_path / "one.ext4"
    image.make(path, 8)
    with image.attached(path) as first:
        mount = image.mount(first)
        try:
            with image.attached(path) as second:
                assert second.path == first.path
                os.close(image.mount(second))
        finally:
            os.close(mount)
    assert gone(path)
    with open(path, "rb") as file:
        assert loop_device.find(file.fileno()) is None


@pytest.mark.parametrize(("more", "noted"), [("data", True), ("", False)])
def test_agent_that_writes_has_no_standby_instance(world: World, more: str, noted: bool) -> None:
    kit.created(world.state)
    grant = kit.grant("data") if more else ""
    answer = world.run_code(
        "import json\ninput()\nprint(json.dumps({'text': 'x'}))",
        filesystem="host",
        disk_mb=128,
        more=f"standby = 1\n{grant}",
    )
    assert answer.error is None
    (row,) = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_started"]
    told = [one for one in row["not_enforced"] if one.startswith("standby: an agent that writes a path")]
    assert bool(told) == noted
