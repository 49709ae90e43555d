"""Both services under a real systemd, by their own units: the supervisor as root, the daemon as the user `covenant`.

The units are those that are shipped, with the drop-in that docs/supervisor.md asks for: the daemon's uid reaches the
supervisor's socket. What is installed in /opt/covenant is this tree. Controllers of version 1 stand in cgroups of the
test's own, which systemd does not know of.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import click

from sandbox.kernel.cgroup import cgroup
from tests.kernel import booted_systemd
from tests.kernel.booted_systemd import UID, BootedSystemd
from tests.kernel.serving import START_SECONDS
from tests.kernel.world import ROOT, World

UNITS: Final = ROOT / "packaging" / "systemd"
NAMES: Final = ("covenantd", "covenant-supervisor")
JOURNAL: Final = ("systemd-journald.service", "systemd-journald.socket")
HOME: Final = Path("/var/lib/covenantd")
_PROGRAMS: Final = {
    "covenantd": "from covenant.start import entry; entry()",
    "covenant": "from covenant.cli.main import entry; entry()",
    "covenant-supervisor": "from sandbox.serve import main; sys.exit(main.main(sys.argv[1:]))",
}
# As booted_systemd's. $V1 names controllers, each with a cgroup of the test's own.
_SCRIPT = """
set -e
mount --make-rprivate /
umount -R -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
for c in $V1; do mkdir -p "/run/cgroups/$c"; mount -t cgroup -o "$c" none "/run/cgroups/$c"; done
mkdir /run/place
mount -t tmpfs -o mode=755 tmpfs /run/place
mkdir /run/place/bin /run/place/tree /run/place/packages
cp "$S"/programs/* /run/place/bin/
mount --bind "$TREE" /run/place/tree
mount -o remount,ro,bind /run/place/tree
mount --bind "$PACKAGES" /run/place/packages
mount -o remount,ro,bind /run/place/packages
mount -t tmpfs -o mode=755 tmpfs /var/lib
mkdir /var/lib/covenant
mount --bind "$STATE" /var/lib/covenant
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir /opt/covenant
mount --rbind /run/place /opt/covenant
mkdir "$S/dev"
mount -t tmpfs -o mode=755 tmpfs "$S/dev"
for n in null zero full random urandom tty; do touch "$S/dev/$n"; mount --bind "/dev/$n" "$S/dev/$n"; done
mkdir "$S/dev/pts" "$S/dev/shm"
chmod 1777 "$S/dev/shm"
touch "$S/dev/console"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$S/dev/pts"
ln -s pts/ptmx "$S/dev/ptmx"
ln -s /proc/self/fd "$S/dev/fd"
mount --move "$S/dev" /dev
mount --bind "$S/passwd" /etc/passwd
mount --bind "$S/group" /etc/group
mount --bind "$S/machine-id" /etc/machine-id
mount --bind /proc/sys /proc/sys
# What PrivateTmp= makes in the machine's own would stay there: nobody stops the units in the end.
mkdir /run/units
mount --bind "$S/units" /run/units
export SYSTEMD_UNIT_PATH=/run/units
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /var/tmp
exec "$SYSTEMD" --system --log-target=journal --show-status=no --unit=test.target </dev/null
"""


class BootedServices(BootedSystemd):
    """Boots with both sockets listening; no other service of ours runs until a client connects."""

    script: ClassVar[str] = _SCRIPT

    def __init__(self, world: World, scratch: Path) -> None:
        self.name, self.world = NAMES[0], world
        self._stage = scratch / "systemd"
        name = f"covenant-test-{uuid.uuid4()}"
        self._cgroup = booted_systemd._cgroups() / name
        found = cgroup.Hierarchies.read()
        self._v1 = sorted(found.mounts) if found.version == 1 else []
        self.also = tuple(found.mounts[one] / name for one in self._v1)
        self._process = None
        for folder in ("units", "programs"):
            (self._stage / folder).mkdir(parents=True)
        for program, code in _PROGRAMS.items():
            path = self._stage / "programs" / program
            paths = "sys.path[:0] = ['/opt/covenant/tree', '/opt/covenant/packages']"
            path.write_text(f"#!/usr/bin/python3 -B\nimport sys\n{paths}\n{code}\n")
            path.chmod(0o755)
        units = self._stage / "units"
        for service in NAMES:
            for kind in ("service", "socket"):
                shutil.copy(UNITS / f"{service}.{kind}", units)
        for one in JOURNAL:
            shutil.copy(Path("/lib/systemd/system", one), units)
        for stub in (*booted_systemd._STUBS, "network.target", "nftables.service"):
            (units / stub).write_text("[Unit]\nDefaultDependencies=no\n")
        self.drop_in("covenant-supervisor.socket", "[Socket]\nSocketMode=0666\n")
        wanted = " ".join((JOURNAL[1], *(f"{service}.socket" for service in NAMES)))
        (units / "test.target").write_text(f"[Unit]\nDefaultDependencies=no\nRequires={wanted}\n")
        (self._stage / "passwd").write_text(f"root:x:0:0::/:/bin/false\ncovenant:x:{UID}:{UID}::/:/bin/false\n")
        (self._stage / "group").write_text(f"root:x:0:\ncovenant:x:{UID}:\n")
        (self._stage / "machine-id").write_text(uuid.uuid4().hex + "\n")

    def environment(self) -> Mapping[str, str]:
        """Return further environment variables of the script."""
        packages = Path(click.__file__).parents[1]
        return {"V1": " ".join(self._v1), "TREE": str(ROOT), "PACKAGES": str(packages), "STATE": str(self.world.state)}

    def drop_in(self, unit: str, text: str) -> None:
        """As `systemctl edit` writes it."""
        folder = self._stage / "units" / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / "of-the-test.conf").write_text(text)

    def unit(self, name: str, text: str) -> None:
        """A unit of the test's own."""
        (self._stage / "units" / name).write_text(f"[Unit]\nDefaultDependencies=no\n{text}")

    def _wait(self) -> None:
        self.eventually(lambda: self._first() and (self.home / "sock").exists())

    @property
    def home(self) -> Path:
        """The daemon's home, as this process reaches it."""
        return self.inside(str(HOME).lstrip("/"))

    def eventually(self, look: Callable[[], Any]) -> Any:
        """Return the first result of ``look`` that is true; fail after START_SECONDS."""
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                if found := look():
                    return found
            except (OSError, StopIteration):
                pass
            assert time.monotonic() < until, self.log()
            time.sleep(0.05)

    def run(self, *command: str, uid: int = 0, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """A command inside, as root or as another user."""
        enter = ["nsenter", "-t", str(self._first()), "-m", "-p", "-n", "-u", "-i", "-S", str(uid), "-G", str(uid)]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "COVENANT_HOME": str(HOME)}
        return subprocess.run(
            [*enter, "--", *command], env=environment, cwd="/", capture_output=True, text=True, timeout=seconds
        )

    def covenant(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command as the daemon's own user."""
        return self.run("/opt/covenant/bin/covenant", *arguments, uid=UID)

    def systemctl(self, *arguments: str) -> str:
        """Run systemctl, assert that it succeeds, and return its output."""
        done = self.run("systemctl", *arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr, self.log())
        return done.stdout.strip()

    def main(self, unit: str = "covenantd.service") -> int:
        """The main process of a unit as this process knows it, 0 while there is none."""
        first = self._first()
        program = f"/opt/covenant/bin/{unit.removesuffix('.service')}".encode()
        for child in Path(f"/proc/{first}/task/{first}/children").read_text().split():
            if program in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return int(child)
        return 0

    def journal(self, which: str = "_SYSTEMD_UNIT=covenantd.service") -> list[str]:
        """Return the journal of a unit's processes, or of the entries that ``which`` names (journalctl(1))."""
        return self.run("journalctl", "--no-pager", "-o", "cat", which).stdout.splitlines()

    def install(self, package: Path) -> None:
        """Put a package into the daemon's home, as its user's."""
        target = self.home / "agents" / package.name
        shutil.copytree(package, target)
        for path in (target, *target.rglob("*")):
            os.chown(path, UID, UID)
