"""Check the size limit of a writable path and the disk behind it, on sample mount tables and devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policy import errors
from sandbox.kernel import procfs, small_files
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.cgroup.cgroup import same
from sandbox.kernel.fs import filesystems
from sandbox.kernel.fs.filesystems import Mount
from sandbox.rootfs import host_paths, writable_size
from sandbox.runner import limits

TABLE = r"""
22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
30 22 7:0 / /srv/room rw,nosuid,nodev,relatime - ext4 /dev/loop0 rw
31 22 7:1 / /srv/a\040b\134 rw,nosuid,nodev master:3 - xfs /dev/loop1 rw
32 22 0:44 / /srv/memory rw,nosuid,nodev - tmpfs none rw
33 22 8:2 /srv/part /srv/bound rw,nosuid,nodev - ext4 /dev/sda2 rw
34 22 7:2 / /srv/open rw,nodev - ext4 /dev/loop2 rw
35 22 7:3 / /srv/twice rw,nosuid,nodev - ext4 /dev/loop3 rw
36 22 7:3 / /mnt/again rw - ext4 /dev/loop3 rw
37 22 0:50 / /srv/btrfs rw,nosuid,nodev - btrfs /dev/sdb rw
""".strip()


@pytest.fixture(autouse=True)
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a sysfs like the kernel's: a partition is in the directory of its disk."""
    disk = tmp_path / "devices" / "sda"
    for place, number, sectors in (
        (disk, "8:0", 2_000_000),
        (disk / "sda2", "8:2", 1_000_000),
        *((tmp_path / "devices" / f"loop{n}", f"7:{n}", 32768 + n) for n in range(4)),
    ):
        place.mkdir(parents=True)
        (place / "dev").write_text(f"{number}\n")
        (place / "size").write_text(f"{sectors}\n")
    (disk / "sda2" / "partition").write_text("2\n")
    links = tmp_path / "block"
    links.mkdir()
    for place in (disk, disk / "sda2", *(tmp_path / "devices" / f"loop{n}" for n in range(4))):
        (links / (place / "dev").read_text().strip()).symlink_to(place)
    monkeypatch.setattr(filesystems, "SYS", links)


def found(number: int, monkeypatch: pytest.MonkeyPatch) -> Mount:
    table = list(filesystems.mounts(TABLE))
    monkeypatch.setattr(filesystems, "mounts", lambda: iter(table))
    mount = next(mount for mount in table if mount.number == number)
    monkeypatch.setattr(filesystems, "mount_of", lambda fd: mount)
    return mount


@pytest.mark.parametrize("name", ["a\u2028b", "a\x0cb", "a\rb", "a\x85b", "a\x1cb", "a\udcffb"])
def test_name_that_user_of_fusermount_chose_ends_no_line_of_mount_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a name once kept every run with a granted path from starting; a byte that is not UTF-8, every run."""
    others = f"90 22 0:60 / /home/eve/{name} rw,nosuid,nodev - fuse {name} rw,user_id=1000"
    text = f"{others}\n{TABLE}\n"
    table = {mount.number: mount for mount in filesystems.mounts(text)}
    assert table[90] == Mount(90, 22, "0:60", "/", f"/home/eve/{name}", frozenset({"rw", "nosuid", "nodev"}), "fuse")
    assert len(table) == len(TABLE.splitlines()) + 1
    assert [mount.place for mount in procfs.parse_mounts(text)] == [mount.point for mount in table.values()]
    file = tmp_path / "mountinfo"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    text_of = small_files.text
    monkeypatch.setattr(small_files, "text", lambda path: text_of(file if path == "/proc/self/mountinfo" else path))
    assert filesystems.lines() == [others, *TABLE.splitlines()]
    assert cgroup.Hierarchies.read().version == 0
    assert host_paths.filesystem_of(os.makedev(0, 44)) == "tmpfs"


def test_mount_table_is_read_with_its_escapes() -> None:
    table = {mount.number: mount for mount in filesystems.mounts(TABLE)}
    assert table[31] == Mount(31, 22, "7:1", "/", "/srv/a b\\", frozenset({"rw", "nosuid", "nodev"}), "xfs")
    assert table[33].root == "/srv/part"


@pytest.mark.parametrize(("number", "path", "mb"), [(30, "/srv/room", 16), (31, "/srv/a b\\", 17)])
def test_file_system_of_its_own_is_as_large_as_its_device(
    number: int, path: str, mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(number, monkeypatch)
    assert writable_size.of(3, path) == writable_size.SizeLimit(mb)


@pytest.mark.parametrize(
    ("number", "path", "why"),
    [
        (22, "/srv/data", "part of the file system that is mounted at `/`"),
        (30, "/srv/room/below", "part of the file system that is mounted at `/srv/room`"),
        (33, "/srv/bound", "part of the file system"),
        (32, "/srv/memory", "it lies on tmpfs"),
        (37, "/srv/btrfs", "it lies on btrfs"),
        (34, "/srv/open", "mounted at `/srv/open` without nosuid"),
        (35, "/srv/twice", "mounted at `/mnt/again` without nosuid and nodev"),
    ],
)
def test_what_has_no_bound_of_its_own_says_why(
    number: int, path: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(number, monkeypatch)
    said = writable_size.of(3, path)
    assert said.mb == 0
    assert why in said.lacking


def test_disk_of_partition_is_whole_one_and_btrfs_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystems.whole_disk("8:2") == "8:0"
    assert filesystems.whole_disk("7:1") == "7:1"
    assert filesystems.whole_disk("0:50") is None
    table = {mount.number: mount for mount in filesystems.mounts(TABLE)}
    monkeypatch.setattr(filesystems, "mount_of", lambda fd: table[fd])
    assert limits.devices([("/", 22), ("/workspace", 22), ("/srv/room", 30)]) == ("7:0", "8:0")
    with pytest.raises(errors.NotEnforceableError, match="`/srv/btrfs` lies on btrfs"):
        limits.devices([("/", 22), ("/srv/btrfs", 37)])


def test_line_is_written_for_each_disk_and_read_back_in_any_order() -> None:
    value = limits.on_devices("$DEVICE rbps=1 wbps=max riops=max wiops=max", ("7:0", "8:0"))
    lines = [f"{disk} rbps=1 wbps=max riops=max wiops=max" for disk in ("7:0", "8:0")]
    assert value == "\n".join(lines)
    assert limits.on_devices("100000 100000", ("7:0",)) == "100000 100000"
    assert same("\n".join(reversed(lines)), value)
    assert not same(lines[0], value)


def test_mount_of_descriptor_is_found_in_real_table() -> None:
    fd = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    try:
        mount = filesystems.mount_of(fd)
    finally:
        os.close(fd)
    assert (mount.kind, mount.point) == ("proc", "/proc")
    with pytest.raises(errors.KernelError):
        filesystems.mount_of(fd)
