"""Programs of Debian that only tests of a release use, and a sandbox of runsc made of the daemon's image."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandbox import config
from scripts.release import container

READY_SECONDS = 120


def programs(place: Path, *names: str) -> Mapping[str, str]:
    """Return an environment with these packages' programs: the machine's own, or unpacked below `place`.

    Nothing is installed: apt downloads what this machine lacks, with what it depends on.
    """
    said = _said("apt-get", "-s", "install", "--no-install-recommends", *names)
    absent = [line.split()[1] for line in said.splitlines() if line.startswith("Inst ")]
    files, tree = place / "files", place / "tree"
    files.mkdir(mode=0o755, parents=True)
    if absent:
        # As root: the user of apt's downloads cannot reach a directory of tests.
        _said("apt-get", "-o", "APT::Sandbox::User=root", "download", *absent, cwd=files)
    for path in sorted(files.glob("*.deb")):
        _said("dpkg-deb", "--extract", str(path), str(tree))
    library = f"{tree}/usr/lib/{os.uname().machine}-linux-gnu"
    made = {**os.environ, "PATH": f"{tree}/usr/bin:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
    made["LD_LIBRARY_PATH"] = f"{library}:{library.replace('/usr/', '/')}"
    made["PERL5LIB"] = ":".join(map(str, (tree / "usr/share/perl5", *sorted(Path(library).glob("perl5/*")))))
    if (tree / "usr/lib/rpm").exists():
        made["RPM_CONFIGDIR"] = f"{tree}/usr/lib/rpm"
    return made


def _said(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


class Container:
    """The daemon's image in a sandbox: no network but a loopback of its own, a read-only root, a home beside it."""

    def __init__(self, bundle: Path, base: Path) -> None:
        self.bundle, self.home = bundle, base / "home"
        self.log = base / "log"
        self.home.mkdir(mode=0o700)
        os.chown(self.home, container.UID, container.UID)
        self._runsc = [str(config.Config().runsc), "--root", str(base / "runsc"), "--network", "none"]
        # A socket in a mounted home is one of the host's.
        self._runsc += ["--ignore-cgroups", "--overlay2", "none", "--host-uds", "all"]
        self._process: subprocess.Popen[bytes] | None = None

    def _describe(self) -> None:
        path = self.bundle / "config.json"
        given: dict[str, Any] = json.loads(path.read_text())
        given["process"] |= {"terminal": False}
        given["process"].pop("capabilities")
        given["root"]["readonly"] = True
        given["mounts"] += [
            {"destination": container.HOME, "type": "bind", "source": str(self.home), "options": ["rbind", "rw"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
        ]
        path.write_text(json.dumps(given))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the image's entry point, and take the sandbox away."""
        self._describe()
        with self.log.open("wb") as log:
            command = [*self._runsc, "run", "--bundle", str(self.bundle), "image"]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            subprocess.run([*self._runsc, "delete", "-force", "image"], capture_output=True, timeout=60, check=False)

    def stop(self) -> int:
        """Stop it as its configuration says, and return the status of the entry point."""
        assert self._process is not None
        subprocess.run([*self._runsc, "kill", "image", "TERM"], timeout=60, check=True)
        return self._process.wait(READY_SECONDS)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run `code` in the sandbox by the image's interpreter, as the image's user."""
        who = ["exec", "--user", f"{container.UID}:{container.UID}", "image"]
        command = [*self._runsc, *who, "/opt/covenant/bin/python", "-I", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, timeout=READY_SECONDS, check=False)

    def until(self, code: str) -> str:
        """Repeat `code` until it succeeds, and return its output; an end of the daemon fails the test."""
        assert self._process is not None
        end = time.monotonic() + READY_SECONDS
        while (done := self.python(code)).returncode != 0:
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, (done.stderr, self.log.read_text())
            time.sleep(0.5)
        return done.stdout
