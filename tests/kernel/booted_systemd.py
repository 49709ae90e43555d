"""A systemd that runs as the first process of namespaces of its own, with the units that a test gives it.

It has its own processes, mounts, network, names and cgroup; /proc/sys is read-only for it. Nothing of it is left when
it is killed but its cgroup, which is removed here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

SYSTEMD = "/lib/systemd/systemd"
START_SECONDS = 60
ANSWER_SECONDS = 60
UID = 990
# What sockets and services depend on, and nothing of the machine's.
_STUBS = ("basic.target", "shutdown.target", "sockets.target", "sysinit.target")

# $S holds units, passwd, group and packages; $NAME is the agent's. Every mount is private to the namespace.
# /usr/share/doc is what tests grant: a directory with a fifo, and with another mount below it.
_SCRIPT = """
set -e
mount --make-rprivate /
umount -l /sys/fs/cgroup/unified 2>/dev/null || true
mount -t cgroup2 none /sys/fs/cgroup
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,ro,bind /proc/sys
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /var/lib
mkdir /var/lib/covenant
cp -a "$S/packages" /var/lib/covenant/
mount --bind "$S/passwd" /etc/passwd
mount --bind "$S/group" /etc/group
mkdir "$S/dev"
mount -t tmpfs -o mode=755 tmpfs "$S/dev"
for n in null zero full random urandom tty; do touch "$S/dev/$n"; mount --bind "/dev/$n" "$S/dev/$n"; done
mkdir "$S/dev/pts" "$S/dev/shm"
chmod 1777 "$S/dev/shm"
touch "$S/dev/console" "$S/dev/shm/of-the-host"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$S/dev/pts"
ln -s pts/ptmx "$S/dev/ptmx"
ln -s /proc/self/fd "$S/dev/fd"
mount --move "$S/dev" /dev
mount -t tmpfs -o mode=755 tmpfs /usr/share/doc
mkdir /usr/share/doc/below
mkfifo -m 666 /usr/share/doc/fifo
mount -t tmpfs -o mode=755 tmpfs /usr/share/doc/below
touch /usr/share/doc/below/of-another-mount
mkdir -p /run/covenant/agents "/run/covenant/roots/$NAME"
chmod 555 "/run/covenant/roots/$NAME"
exec "$SYSTEMD" --system --log-target=console --show-status=no --unit=test.target </dev/null
"""


def _cgroups() -> Path:
    """Where cgroup version 2 is mounted on this machine."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, at, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(at)
    raise AssertionError("cgroup version 2 is not mounted: systemd cannot run")


class BootedSystemd:
    """Boots on entry with the socket of the units in `units` listening; `ask` is one connection."""

    script: ClassVar[str] = _SCRIPT
    # Cgroups of other hierarchies in which it is too, and which are removed with its own.
    also: tuple[Path, ...] = ()

    def __init__(self, units: Path, package: Path, scratch: Path) -> None:
        (service,) = units.glob("*@.service")
        self.name = service.name.removesuffix("@.service")
        self._stage = scratch / "systemd"
        self._cgroup = _cgroups() / f"covenant-test-{uuid.uuid4()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._lay_out(units, package)

    def _lay_out(self, units: Path, package: Path) -> None:
        self._stage.mkdir()
        target = self._stage / "units"
        target.mkdir()
        for unit in (*units.glob("*.service"), *units.glob("*.socket")):
            shutil.copy(unit, target)
        for stub in _STUBS:
            (target / stub).write_text("[Unit]\nDefaultDependencies=no\n")
        (target / "test.target").write_text(f"[Unit]\nDefaultDependencies=no\nRequires={self.name}.socket\n")
        (sysusers,) = units.glob("*.sysusers.conf")
        user = sysusers.read_text().split()[1]
        (self._stage / "passwd").write_text(f"root:x:0:0::/:/bin/false\n{user}:x:{UID}:{UID}::/:/bin/false\n")
        (self._stage / "group").write_text(f"root:x:0:\n{user}:x:{UID}:\n")
        lines = (target / f"{self.name}@.service").read_text().splitlines()
        (bound,) = (
            line for line in lines if line.startswith("BindReadOnlyPaths=") and line.endswith('"/workspace":norbind')
        )
        copy = self._stage / "packages" / Path(bound.split('"')[1]).name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("*.json"))
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o555 if path.is_dir() or copy.name.endswith("-x") else 0o444)

    def __enter__(self) -> Self:
        for one in self._all:
            one.mkdir()
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "S": str(self._stage),
            "NAME": self.name,
            "SYSTEMD": SYSTEMD,
            "SYSTEMD_UNIT_PATH": str(self._stage / "units"),
            "container": "covenant-test",
            **self.environment(),
        }
        # The shell moves itself before the cgroup namespace is made, so that this is the root of what systemd sees.
        join = "".join(f'echo $$ > "{one}/cgroup.procs"; ' for one in self._all) + 'exec unshare "$@"'
        spaces = ["--fork", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--kill-child=SIGKILL"]
        with (self._stage / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", join, "sh", *spaces, "sh", "-c", self.script], env=environment, stdout=log, stderr=log
            )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def environment(self) -> Mapping[str, str]:
        """Return further environment variables of the script."""
        return {}

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError, StopIteration):
                if self.inside("run/covenant/agents", f"{self.name}.sock").exists():
                    return
            time.sleep(0.05)
        raise AssertionError(f"systemd did not open the socket: {self.log()}")

    def _first(self) -> int:
        assert self._process is not None
        pid = self._process.pid
        return int(next(iter(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())))

    def inside(self, *parts: str) -> Path:
        """A path of systemd's own root, as this process reaches it."""
        return Path(f"/proc/{self._first()}/root", *parts)

    def log(self) -> str:
        """Return the output before systemd's own log, which has no terminal."""
        return (self._stage / "log").read_text(errors="replace")

    def ask(self, line: bytes, *, seconds: float = ANSWER_SECONDS) -> bytes:
        """One connection: `line` in, everything that comes out until the agent's end."""
        with self._connected(seconds) as end:
            end.sendall(line)
            end.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: end.recv(65536), b""))

    @contextlib.contextmanager
    def _connected(self, seconds: float) -> Iterator[socket.socket]:
        # By the directory's descriptor: the path itself is longer than a socket's address.
        directory = os.open(self.inside("run/covenant/agents"), os.O_RDONLY | os.O_DIRECTORY)
        try:
            with socket.socket(socket.AF_UNIX) as end:
                end.settimeout(seconds)
                end.connect(f"/proc/self/fd/{directory}/{self.name}.sock")
                yield end
        finally:
            os.close(directory)

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        end = time.monotonic() + ANSWER_SECONDS
        while left := [one for one in self._all if one.exists()]:
            for directory in [place for one in left for place, _, _ in os.walk(one, topdown=False)]:
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
            assert time.monotonic() < end, f"still in use: {left}"
            time.sleep(0.02)

    @property
    def _all(self) -> tuple[Path, ...]:
        return (self._cgroup, *self.also)
