"""Files outside the grants, and writes where only reading was granted."""

from __future__ import annotations

import os
import tempfile

from harness import Blocked, probe
from raw import call

PACKAGE = "/workspace"
MNT_DETACH = 2
GRANTED = "/usr/share/common-licenses"  # the one read grant of this package's manifest

# What each name says must never be readable; the control plants a file of its own at each place.
SHADOW = "/etc/shadow"
PRIVATE_KEY = "/root/.ssh/id_ed25519"
STATE_DIRECTORIES = ("/var/lib/covenant", "/etc/covenant", "/root/.covenant")


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return f"read {len(file.read(4096))} bytes of {path}"


def _first_entry(*directories: str) -> str:
    """List each directory; the first that has an entry is the catch.

    Raises:
        OSError: of the last directory, when none could be listed.
        Blocked: they can be listed, and are empty.
    """
    error: OSError | None = None
    for directory in directories:
        try:
            entries = sorted(os.listdir(directory))
        except OSError as failure:
            error = failure
            continue
        if entries:
            return f"{directory} has {entries[:5]}"
    if error is not None:
        raise error
    raise Blocked("nothing there")


@probe("file_shadow")
def file_shadow() -> str:
    return _read(SHADOW)


@probe("file_private_key")
def file_private_key() -> str:
    return _read(PRIVATE_KEY)


@probe("file_supervisor_state")
def file_supervisor_state() -> str:
    return _first_entry(*STATE_DIRECTORIES)


@probe("file_host_directories")
def file_host_directories() -> str:
    return _first_entry("/home", "/root", "/var", "/srv", "/opt", "/boot", "/mnt", "/media")


@probe("file_other_programs")
def file_other_programs() -> str:
    """The closure of python3 holds no other tool of the host."""
    return _read("/usr/bin/env")


@probe("file_beside_the_grant")
def file_beside_the_grant() -> str:
    """A grant of one directory says nothing of its neighbour."""
    return _first_entry("/usr/share/doc", "/usr/share/perl5", "/usr/include")


@probe("file_dotdot_from_grant")
def file_dotdot_from_grant() -> str:
    start = os.open(GRANTED, os.O_RDONLY | os.O_DIRECTORY)
    found = os.open("../../../../.." + SHADOW, os.O_RDONLY, dir_fd=start)
    return f"read {len(os.read(found, 4096))} bytes"


@probe("file_symlink_to_host")
def file_symlink_to_host() -> str:
    link = os.path.join(tempfile.mkdtemp(dir="/tmp"), "link")
    os.symlink(SHADOW, link)
    return _read(link)


@probe("file_proc_root")
def file_proc_root() -> str:
    return _read("/proc/1/root" + SHADOW)


@probe("file_proc_cwd")
def file_proc_cwd() -> str:
    return _read("/proc/self/cwd/.." + SHADOW)


@probe("package_create")
def package_create() -> str:
    path = os.path.join(PACKAGE, "planted")
    with open(path, "xb") as file:
        file.write(b"x")
    os.unlink(path)
    return f"created {path}"


@probe("package_overwrite")
def package_overwrite() -> str:
    descriptor = os.open(os.path.join(PACKAGE, "agent.toml"), os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"\n# changed\n")
    return "appended to agent.toml"


@probe("package_rename")
def package_rename() -> str:
    """Rename there and back, so that the control leaves the package whole."""
    source, target = os.path.join(PACKAGE, "gate.py"), os.path.join(PACKAGE, "gate.old")
    os.rename(source, target)
    os.rename(target, source)
    return "renamed gate.py"


@probe("package_chmod")
def package_chmod() -> str:
    os.chmod(os.path.join(PACKAGE, "gate.py"), 0o777)
    return "gate.py is writable by all"


@probe("package_hardlink")
def package_hardlink() -> str:
    """A second name outside the read-only mount would be a writable one."""
    failure: OSError | None = None
    for directory in ("/tmp", "/dev/shm", "/"):
        target = os.path.join(directory, f"hardlink-{os.getpid()}")
        try:
            os.link(os.path.join(PACKAGE, "gate.py"), target)
        except OSError as error:
            failure = error
            continue
        os.close(os.open(target, os.O_RDWR))
        os.unlink(target)
        return f"opened the package's gate.py for writing as {target}"
    assert failure is not None
    raise failure


@probe("package_reopen_descriptor")
def package_reopen_descriptor() -> str:
    """/proc/self/fd opens the file anew: a read-only descriptor must not become a writable one."""
    reading = os.open(os.path.join(PACKAGE, "gate.py"), os.O_RDONLY)
    writing = os.open(f"/proc/self/fd/{reading}", os.O_RDWR)
    os.close(writing)
    return "reopened gate.py for writing"


@probe("grant_read_only")
def grant_read_only() -> str:
    """A path granted for reading takes no new file."""
    path = os.path.join(GRANTED, "planted")
    with open(path, "xb") as file:
        file.write(b"x")
    os.unlink(path)
    return f"created {path}"


@probe("root_write")
def root_write() -> str:
    path = "/planted"
    with open(path, "xb") as file:
        file.write(b"x")
    os.unlink(path)
    return f"created {path}"


@probe("device_directory_write")
def device_directory_write() -> str:
    """/dev is memory that no disk_mb counts."""
    path = "/dev/planted"
    with open(path, "xb") as file:
        file.write(b"x" * 4096)
    os.unlink(path)
    return f"created {path}"


@probe("device_shm_write")
def device_shm_write() -> str:
    """/dev/shm is memory that no disk_mb counts."""
    path = f"/dev/shm/planted-{os.getpid()}"
    with open(path, "xb") as file:
        file.write(b"x" * 4096)
    os.unlink(path)
    return f"created {path}"


@probe("proc_sys_write")
def proc_sys_write() -> str:
    path = "/proc/sys/net/ipv4/tcp_sack"
    with open(path, "r+b", buffering=0) as file:
        value = file.read(16)
        file.seek(0)
        file.write(value)
    return f"wrote {path}"


@probe("xattr_trusted")
def xattr_trusted() -> str:
    """Attributes that only privilege sets: file capabilities live in their neighbourhood."""
    path = f"/tmp/xattr-{os.getpid()}"
    with open(path, "xb"):
        pass
    try:
        os.setxattr(path, "trusted.covenant", b"1")
    finally:
        os.unlink(path)
    return "set trusted.covenant"


@probe("package_deleted_name")
def package_deleted_name() -> str:
    """Removed and written anew: another file under the signed name."""
    path = os.path.join(PACKAGE, "gate.py")
    with open(path, "rb") as file:
        content = file.read()
    os.unlink(path)
    with open(path, "xb") as file:
        file.write(content)
    return "replaced gate.py"


@probe("file_symlink_race")
def file_symlink_race() -> str:
    """A name that is a granted file in one moment and a link to the host's in the next."""
    directory = tempfile.mkdtemp(dir="/tmp")
    target, link, file = (os.path.join(directory, name) for name in ("name", "link", "file"))
    failure: OSError | None = None
    for _ in range(50):
        with open(file, "wb"):
            pass
        os.symlink(SHADOW, link)
        os.replace(file, target)
        os.replace(link, target)
        try:
            return _read(target)
        except OSError as error:
            failure = error
    assert failure is not None
    raise failure


@probe("file_magic_link")
def file_magic_link() -> str:
    """Escape through a link in /proc/self/fd, which leads to the opened directory under any name that it has now."""
    start = os.open(GRANTED, os.O_PATH | os.O_DIRECTORY)
    return _read(f"/proc/self/fd/{start}/../../../etc/shadow")


@probe("device_node_disk")
def device_node_disk() -> str:
    """Make a block device node for the host's first disk, by number."""
    path = f"/tmp/disk-{os.getpid()}"
    os.mknod(path, 0o600 | 0o060000, os.makedev(254, 0))
    os.unlink(path)
    return "made block device 254:0"


@probe("device_node_zero")
def device_node_zero() -> str:
    """Make a device node and open it; where the node can be made, nodev must refuse the open."""
    path = f"/tmp/zero-{os.getpid()}"
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    try:
        descriptor = os.open(path, os.O_RDONLY)
        return f"made 1:5 and read {len(os.read(descriptor, 16))} bytes of it"
    finally:
        os.unlink(path)


@probe("device_fuse")
def device_fuse() -> str:
    """runsc makes /dev/fuse whether asked or not; a mount of it would serve files of the agent's own making."""
    device = os.open("/dev/fuse", os.O_RDWR)
    target = tempfile.mkdtemp(dir="/tmp").encode()
    call("mount", b"fuse", target, b"fuse", 0, f"fd={device},rootmode=40000,user_id=0,group_id=0".encode())
    call("umount2", target, MNT_DETACH)
    return "mounted a file system of its own"
