"""Mounts, roots and namespaces."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile

from harness import Blocked, probe
from raw import by_number, call, number

MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096
MNT_DETACH = 2
AT_FDCWD = -100
OPEN_TREE_CLONE = 1
CLONE_FLAGS = {"mount": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000,
               "pid": 0x20000000, "network": 0x40000000, "cgroup": 0x02000000}
SIGCHLD = 17


def _mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode())


def _mount_point() -> str:
    return tempfile.mkdtemp(dir="/tmp")


@probe("mount_tmpfs")
def mount_tmpfs() -> str:
    target = _mount_point()
    _mount("tmpfs", target, "tmpfs")
    call("umount2", target.encode(), MNT_DETACH)
    return f"mounted a tmpfs at {target}"


@probe("mount_bind")
def mount_bind() -> str:
    """The root once more, without the flags of the mounts above it."""
    target = _mount_point()
    _mount("/", target, "", MS_BIND)
    entries = len(os.listdir(target))
    call("umount2", target.encode(), MNT_DETACH)
    return f"bound / with {entries} entries"


@probe("mount_proc")
def mount_proc() -> str:
    """A second /proc would have none of the masks of the first."""
    target = _mount_point()
    _mount("proc", target, "proc")
    entries = len(os.listdir(target))
    call("umount2", target.encode(), MNT_DETACH)
    return f"a /proc with {entries} entries"


@probe("mount_sysfs")
def mount_sysfs() -> str:
    target = _mount_point()
    _mount("sysfs", target, "sysfs")
    call("umount2", target.encode(), MNT_DETACH)
    return "mounted sysfs"


@probe("mount_cgroup")
def mount_cgroup() -> str:
    """A cgroup tree of one's own is where limits are rewritten."""
    target = _mount_point()
    _mount("cgroup", target, "cgroup", 0, "memory")
    entries = sorted(os.listdir(target))[:4]
    call("umount2", target.encode(), MNT_DETACH)
    return f"mounted the memory controller: {entries}"


@probe("mount_over_package")
def mount_over_package() -> str:
    """Mount over the package: a file loaded later would come from the mount."""
    _mount("tmpfs", "/workspace", "tmpfs")
    empty = not os.listdir("/workspace")
    call("umount2", b"/workspace", MNT_DETACH)
    return f"the package was hidden: {empty}"


@probe("mount_remount_writable")
def mount_remount_writable() -> str:
    _mount("none", "/workspace", "", MS_REMOUNT | MS_BIND)
    return "remounted the package without ro"


@probe("mount_umount")
def mount_umount() -> str:
    """Unmount /tmp, which would show the directory under it."""
    call("umount2", b"/tmp", MNT_DETACH)
    return "took /tmp away"


@probe("mount_new_api")
def mount_new_api() -> str:
    return f"descriptor {call('fsopen', b'tmpfs', 0)}"


@probe("mount_open_tree")
def mount_open_tree() -> str:
    return f"descriptor {call('open_tree', AT_FDCWD, b'/', OPEN_TREE_CLONE)}"


@probe("mount_move")
def mount_move() -> str:
    call("move_mount", AT_FDCWD, b"/workspace", AT_FDCWD, b"/tmp", 0)
    return "moved a mount"


@probe("mount_setattr")
def mount_setattr() -> str:
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", 0, 1, 0, 0), 32)
    call("mount_setattr", AT_FDCWD, b"/workspace", 0, attributes, 32)
    return "cleared the read-only attribute"


@probe("chroot")
def chroot() -> str:
    """With the right to chroot, a root is only a suggestion: the classic way out walks up from inside."""
    os.chroot(_mount_point())
    return f"the root is now {os.listdir('/')}"


@probe("pivot_root")
def pivot_root() -> str:
    new = _mount_point()
    _mount("tmpfs", new, "tmpfs")
    os.mkdir(new + "/old")
    call("unshare", CLONE_FLAGS["mount"])
    call("pivot_root", new.encode(), (new + "/old").encode())
    return f"the root is now {os.listdir('/')}"


@probe("handle_open")
def handle_open() -> str:
    """A file handle names an inode and forgets every mount in between (the "shocker" escape)."""
    handle = ctypes.create_string_buffer(struct.pack("=IiQ", 8, 1, 2), 16)
    root = os.open("/", os.O_RDONLY)
    return f"descriptor {call('open_by_handle_at', root, handle, 0)}"


@probe("handle_name")
def handle_name() -> str:
    handle = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 136)
    mount_id = ctypes.create_string_buffer(4)
    call("name_to_handle_at", AT_FDCWD, b"/", handle, mount_id, 0)
    return "took the handle of /"


def _unshare(kind: str) -> str:
    call("unshare", CLONE_FLAGS[kind])
    return f"a new {kind} namespace"


@probe("unshare_user")
def unshare_user() -> str:
    """The first step of most escapes: in a user namespace of one's own one is root."""
    return _unshare("user")


@probe("unshare_mount")
def unshare_mount() -> str:
    return _unshare("mount")


@probe("unshare_network")
def unshare_network() -> str:
    return _unshare("network")


@probe("unshare_uts")
def unshare_uts() -> str:
    return _unshare("uts")


@probe("unshare_ipc")
def unshare_ipc() -> str:
    return _unshare("ipc")


@probe("unshare_pid")
def unshare_pid() -> str:
    return _unshare("pid")


@probe("clone_user_namespace")
def clone_user_namespace() -> str:
    """The same door by another number: a filter that knows only unshare leaves it open."""
    return _reap(call("clone", CLONE_FLAGS["user"] | SIGCHLD, 0, 0, 0, 0))


@probe("clone3_user_namespace")
def clone3_user_namespace() -> str:
    """The flags of clone3 lie in memory, where no filter can look."""
    arguments = ctypes.create_string_buffer(struct.pack("=8Q", CLONE_FLAGS["user"], 0, 0, 0, SIGCHLD, 0, 0, 0), 64)
    return _reap(call("clone3", arguments, 64))


def _reap(child: int) -> str:
    if child == 0:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        raise Blocked(f"the child ended with status {status}")
    return "a child in a user namespace of its own"


@probe("setns")
def setns() -> str:
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY)
    call("setns", descriptor, CLONE_FLAGS["network"])
    return "entered a network namespace by descriptor"


@probe("x32_mount")
def x32_mount() -> str:
    """The x32 numbers reach the same kernel by another table."""
    by_number(0x40000000 | number("mount"), b"tmpfs", b"/tmp", b"tmpfs", 0, None, name="x32 mount")
    return "mounted through the x32 table"
