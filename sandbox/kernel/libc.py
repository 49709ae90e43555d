"""Thin wrappers of the system calls that Python's os module lacks, under the kernel's own names.

Each raises OSError with the errno and the call's name. The numbers of the calls added since Linux 5.1 are
the same on every architecture (include/uapi/asm-generic/unistd.h), so one table serves x86_64 and aarch64.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import struct
from collections.abc import Collection, Mapping
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

# asm-generic/unistd.h
SYS_OPEN_TREE = 428
SYS_MOVE_MOUNT = 429
SYS_FSOPEN = 430
SYS_FSCONFIG = 431
SYS_FSMOUNT = 432
SYS_CLOSE_RANGE = 436
SYS_OPENAT2 = 437
SYS_PIDFD_GETFD = 438
SYS_MOUNT_SETATTR = 442
# Older than that table; arch/x86/entry/syscalls/syscall_64.tbl, and asm-generic/unistd.h for the rest.
SYS_BPF = 321 if os.uname().machine == "x86_64" else 280

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x04

FSOPEN_CLOEXEC = FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE = 0, 1, 6

# mount(2) flags
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2

# mallopt(3), malloc.h
_M_ARENA_MAX = -8

# mount_setattr(2) attributes, include/uapi/linux/mount.h
MOUNT_ATTR_RDONLY = 0x01
MOUNT_ATTR_NOSUID = 0x02
MOUNT_ATTR_NODEV = 0x04
MOUNT_ATTR_NOEXEC = 0x08
MOUNT_ATTR_IDMAP = 0x00100000
MOUNT_ATTR_NOSYMFOLLOW = 0x00200000

_CLONE_VM, _CLONE_VFORK = 0x100, 0x4000
_CHILD_STACK = 1 << 16
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_SECCOMP = 22
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

SECCOMP_MODE_FILTER = 2

# linux/stat.h, statx(2): what is asked for, and where stx_ino, stx_size and the device stand in the answer.
_STATX_INO, _STATX_SIZE = 0x100, 0x200
_STATX_OWNED = 0x1 | 0x2 | 0x4 | 0x8  # kind, mode, number of names, uid
_STATX = struct.Struct("=32xQQ88xII")
_STATX_OWNER = struct.Struct("=16xII4xH")
_Statx = ctypes.c_char * 256
_AT_SYMLINK_NOFOLLOW = 0x100

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

MADV_COLLAPSE = 25  # asm-generic/mman-common.h
_LINUX_CAPABILITY_VERSION_3 = 0x20080522


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _checked(result: int, call: str, path: str | bytes = "") -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", os.fsdecode(path) or None)
    return result


def _syscall(number: int, call: str, path: str, *args: object) -> int:
    return _checked(_libc.syscall(ctypes.c_long(number), *args), call, path)


def openat2(path: str, flags: int, *, dir_fd: int = AT_FDCWD, resolve: int = 0, mode: int = 0) -> int:
    """openat2(2): open ``path`` with a resolution policy; the descriptor is close-on-exec.

    Raises:
        OSError: ELOOP for a symlink under RESOLVE_NO_SYMLINKS, EXDEV for an escape under RESOLVE_BENEATH.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    return _syscall(
        SYS_OPENAT2,
        "openat2",
        path,
        ctypes.c_int(dir_fd),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )


def pidfd_getfd(pidfd: int, number: int) -> int:
    """pidfd_getfd(2): another process's descriptor, opened here as well."""
    return _syscall(SYS_PIDFD_GETFD, "pidfd_getfd", "", ctypes.c_int(pidfd), ctypes.c_int(number), ctypes.c_uint(0))


def open_tree_clone(fd: int, *, recursive: bool = False) -> int:
    """open_tree(2): a detached copy of the mount that ``fd`` lies on, rooted at ``fd``.

    Not recursive unless asked: what is mounted below a granted directory is not granted with it.
    """
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    return _syscall(
        SYS_OPEN_TREE, "open_tree", f"fd {fd}", ctypes.c_int(fd), ctypes.c_char_p(b""), ctypes.c_uint(flags)
    )


def new_mount(fstype: str, options: Mapping[str, str | None], attributes: int) -> int:
    """fsopen(2), fsconfig(2), fsmount(2): a detached mount of a new file system; ``None`` makes an option a flag.

    Raises:
        OSError: EINVAL for an option that this kernel does not know, among others.
    """
    context = _syscall(SYS_FSOPEN, "fsopen", fstype, ctypes.c_char_p(fstype.encode()), ctypes.c_uint(FSOPEN_CLOEXEC))
    try:
        for key, value in options.items():
            kind = FSCONFIG_SET_FLAG if value is None else FSCONFIG_SET_STRING
            _fsconfig(context, kind, key, value)
        _fsconfig(context, FSCONFIG_CMD_CREATE, None, None)
        return _syscall(
            SYS_FSMOUNT,
            "fsmount",
            fstype,
            ctypes.c_int(context),
            ctypes.c_uint(FSMOUNT_CLOEXEC),
            ctypes.c_uint(attributes),
        )
    finally:
        os.close(context)


def _fsconfig(context: int, command: int, key: str | None, value: str | None) -> None:
    given = (None if one is None else one.encode() for one in (key, value))
    words = (ctypes.c_char_p(one) for one in given)
    _syscall(
        SYS_FSCONFIG, "fsconfig", key or "", ctypes.c_int(context), ctypes.c_uint(command), *words, ctypes.c_int(0)
    )


def mount_setattr(
    fd: int, attributes: int, *, private: bool = True, recursive: bool = False, idmap: int | None = None
) -> None:
    """mount_setattr(2) on the mount that ``fd`` opens: set ``attributes``, make it private.

    ``recursive`` takes every mount below it along, all or none. ``idmap`` is a user namespace whose maps say which
    user of the disk is which; a detached mount that had none takes it.
    """
    if idmap is not None:
        attributes |= MOUNT_ATTR_IDMAP
    attr = _MountAttr(attributes, 0, MS_PRIVATE if private else 0, idmap or 0)
    _syscall(
        SYS_MOUNT_SETATTR,
        "mount_setattr",
        f"fd {fd}",
        ctypes.c_int(fd),
        ctypes.c_char_p(b""),
        ctypes.c_uint(AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )


def move_mount(fd: int, target: str) -> None:
    """move_mount(2): attach the detached mount ``fd`` at ``target`` of the caller's mount namespace."""
    _syscall(
        SYS_MOVE_MOUNT,
        "move_mount",
        target,
        ctypes.c_int(fd),
        ctypes.c_char_p(b""),
        ctypes.c_int(AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH),
    )


def mount(source: str, target: str, fstype: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    _checked(
        _libc.mount(
            ctypes.c_char_p(os.fsencode(source)),
            ctypes.c_char_p(os.fsencode(target)),
            ctypes.c_char_p(fstype.encode()) if fstype else None,
            ctypes.c_ulong(flags),
            ctypes.c_char_p(data.encode()) if data else None,
        ),
        "mount",
        target,
    )


def statx_which(directory: int, name: bytes) -> tuple[int, int, int, int]:
    """Return inode, size and the device's two numbers of a name in a directory, by statx(2) without following symlinks.

    The call asks for none of its times. A file system with fine timestamps gives a file whose times were read new ones
    at the next write, and the next sync then has to write them beside the data.
    """
    found = _Statx()
    result = _libc.statx(directory, name, _AT_SYMLINK_NOFOLLOW, _STATX_INO | _STATX_SIZE, found)
    _checked(result, "statx", name)
    inode, size, major, minor = _STATX.unpack_from(found)
    return inode, size, major, minor


def statx_open(fd: int) -> tuple[int, int, int, int, int, int]:
    """statx(2) of an open file, without its times as ``statx_which``: mode, number of names, uid, inode, and the two
    numbers of the device."""
    found = _Statx()
    _checked(_libc.statx(fd, b"", AT_EMPTY_PATH, _STATX_OWNED | _STATX_INO, found), "statx")
    links, uid, mode = _STATX_OWNER.unpack_from(found)
    inode, _, major, minor = _STATX.unpack_from(found)
    return mode, links, uid, inode, major, minor


def start_writing(fd: int) -> None:
    """sync_file_range(2): have what was written to a file be on its way to the disk before its sync is asked for.

    It promises nothing and tells of nothing: that sync does, with the errors of what was begun here too.
    """
    _libc.sync_file_range(ctypes.c_int(fd), ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def syncfs(fd: int) -> None:
    """syncfs(2): write everything of the file system that ``fd`` is on to the disk.

    Raises:
        OSError: EIO, ENOSPC among others, when a write since the opening of ``fd`` failed (Linux 5.8).
    """
    _checked(_libc.syncfs(ctypes.c_int(fd)), "syncfs")


def rename_new(source: str, target: str) -> None:
    """renameat2(2) with RENAME_NOREPLACE: a file gets its name whole, or there was one of that name already."""
    result = _libc.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE)
    _checked(result, "renameat2", target)


def exchange(one: str, other: str) -> None:
    """renameat2(2) with RENAME_EXCHANGE: each of two files has the name of the other, both at once."""
    result = _libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)
    _checked(result, "renameat2", other)


def umount2(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _checked(_libc.umount2(ctypes.c_char_p(os.fsencode(target)), ctypes.c_int(flags)), "umount2", target)


def unshare(flags: int) -> None:
    """unshare(2) for the calling thread."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def clone_ended(flags: int) -> int:
    """clone(2): make a child in new namespaces that calls getpid(2) and has ended when this returns. Returns its pid.

    The child shares the memory, so nothing is copied, and runs no code of Python. It is a zombie: its namespaces can be
    opened until the caller waits for it.

    Raises:
        OSError: the kernel makes no such child.
    """
    with mmap.mmap(-1, _CHILD_STACK) as stack:
        bottom = ctypes.c_char.from_buffer(stack)
        top = ctypes.c_void_p(ctypes.addressof(bottom) + _CHILD_STACK)
        function = ctypes.cast(_libc.getpid, ctypes.c_void_p)
        try:
            made = _libc.clone(function, top, ctypes.c_int(flags | _CLONE_VM | _CLONE_VFORK | signal.SIGCHLD), None)
        finally:
            del bottom
    return _checked(made, "clone")


def private_mounts() -> None:
    """A mount namespace of the caller's own, whose mounts never reach the machine's and never come from it."""
    unshare(CLONE_NEWNS)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    """prctl(2) with integer arguments."""
    args = [ctypes.c_ulong(a & 0xFFFFFFFFFFFFFFFF) for a in (arg2, arg3, arg4, arg5)]
    return _checked(_libc.prctl(ctypes.c_int(option), *args), "prctl")


def set_no_new_privs() -> None:
    """PR_SET_NO_NEW_PRIVS: execve of the caller and its children never grants privileges."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def set_parent_death_signal(signal_number: int) -> None:
    """PR_SET_PDEATHSIG: the caller gets this signal when the thread that forked it ends."""
    prctl(PR_SET_PDEATHSIG, signal_number)


def set_name(name: str) -> None:
    """PR_SET_NAME: how the calling thread is shown; of the name 15 bytes are taken."""
    raw = ctypes.create_string_buffer(name.encode())
    prctl(PR_SET_NAME, ctypes.addressof(raw))


def one_arena() -> None:
    """mallopt(3) with M_ARENA_MAX: threads that come take their memory where the first takes its, not each from a heap
    of its own. A C library without it has no such heaps."""
    with contextlib.suppress(AttributeError):
        _libc.mallopt(ctypes.c_int(_M_ARENA_MAX), ctypes.c_int(1))


def setfsuid(uid: int) -> None:
    """setfsuid(2): files are opened in this uid's name; with another than 0 the rights over all files go.

    Raises:
        OSError: the kernel did not take it.
    """
    _identity(_libc.setfsuid, "setfsuid", uid)


def fsuid() -> int:
    """Return the uid in whose name this thread opens files."""
    return ctypes.c_uint32(_libc.setfsuid(ctypes.c_uint32(0xFFFFFFFF))).value


def setfsgid(gid: int) -> None:
    """setfsgid(2)."""
    _identity(_libc.setfsgid, "setfsgid", gid)


def _identity(call: Any, name: str, number: int) -> None:
    # The call says what was before and never that it failed; asked with a number that is none, it says what is now.
    call(ctypes.c_uint32(number))
    if ctypes.c_uint32(call(ctypes.c_uint32(0xFFFFFFFF))).value != number:
        raise OSError(errno.EPERM, f"{name}: the kernel did not take {number}")


def status_flags(fd: int) -> int:
    """fcntl(2) F_GETFL: how a descriptor was opened."""
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def mlock(address: int, length: int) -> None:
    """mlock(2): keep these pages out of swap until they are unmapped."""
    _checked(_libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(length)), "mlock")


def madvise(address: int, length: int, advice: int) -> None:
    """madvise(2): say how these pages are used."""
    _checked(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice)), "madvise")


def getrandom(address: int, length: int) -> None:
    """getrandom(2) into memory, so that no other object ever has these bytes."""
    got = _checked(_libc.getrandom(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_uint(0)), "getrandom")
    if got != length:  # more than 256 bytes may be cut short by a signal
        raise OSError(errno.EINTR, "getrandom: cut short")


CLOSE_RANGE_CLOEXEC = 4
_LAST_FD = 0xFFFFFFFF


def close_range(first: int, last: int = _LAST_FD, *, at_exec: bool = False) -> None:
    """close_range(2): close every descriptor from ``first`` to ``last``, or mark them close-on-exec."""
    flags = CLOSE_RANGE_CLOEXEC if at_exec else 0
    _syscall(SYS_CLOSE_RANGE, "close_range", "", ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(flags))


def drop_bounding_set() -> None:
    """PR_CAPBSET_DROP for every capability that this kernel has: no execve of the caller brings one back."""
    number = 0
    while True:
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError as e:
            if e.errno == errno.EINVAL and number:
                return  # past the last capability of this kernel
            raise
        number += 1


def keep_capabilities(kept: Collection[int]) -> None:
    """capset(2) and PR_CAPBSET_DROP: hold these and no others, and let no execve of root bring another back.

    Raises:
        OSError: EPERM when one of them is not held already.
    """
    number = 0
    while True:
        try:
            if number not in kept:
                prctl(PR_CAPBSET_DROP, number)
            else:
                prctl(PR_CAPBSET_READ, number)
        except OSError as e:
            if e.errno == errno.EINVAL and number:
                break  # past the last capability of this kernel
            raise
        number += 1
    low, high = (sum(1 << at for at in range(32) if at + base in kept) for base in (0, 32))
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable of the lower 32, then of the upper.
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)), "capset")


def setns(fd: int, kind: int) -> None:
    """setns(2): the calling thread enters the namespace that ``fd`` opens, of one CLONE_NEW* ``kind``."""
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def drop_capabilities() -> None:
    """capset(2): the calling thread holds no capability in any of its sets, and can inherit none."""
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def set_seccomp_filter(program: bytes) -> None:
    """PR_SET_SECCOMP: bind the calling thread to ``program``, an array of struct sock_filter of 8 bytes each.

    The caller must have no-new-privs set, or CAP_SYS_ADMIN (seccomp(2)).
    """
    count, rest = divmod(len(program), 8)
    if rest or not 0 < count < 1 << 16:
        raise OSError(errno.EINVAL, "prctl: this is no filter program")
    whole = _SockFprog(count, program)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(whole))


def attached_programs(index: int, place: int) -> int:
    """How many BPF programs are attached at a place (enum bpf_attach_type) of a device of the calling thread's
    namespace. For a place of a cgroup or of a network namespace, ``index`` is a descriptor of it.

    0 where the kernel has no such place, or does not let itself be asked.
    """
    # linux/bpf.h, BPF_PROG_QUERY: device, place, two flags, where ids go, how many; the kernel writes up to 64 bytes.
    query = ctypes.create_string_buffer(struct.pack("=IIIIQI", index, place, 0, 0, 0, 0), 64)
    try:
        _syscall(SYS_BPF, "bpf", f"device {index}", ctypes.c_int(16), query, ctypes.c_uint(64))
    except OSError as e:
        if e.errno in (errno.EINVAL, errno.EBADF, errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise
    return int(struct.unpack_from("=I", query, 24)[0])
