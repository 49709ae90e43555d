"""Does runsc work here? Asked by starting a sandbox: a version proves nothing.

Builds of a good version with Go 1.25 and later panic now and then when a task blocks, a kvm platform hangs for ever,
and a release of 2022 knows no systrap; each of them prints a version. So the probe runs processes, with a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import signal
import subprocess
import tempfile

# Absolute, in the order of sandbox/config.py: the first that is there is the one that would be used.
PLACES = ("/usr/bin/runsc", "/usr/local/bin/runsc")

# The oldest that is worth installing; whether it works, the probe decides. Debian 12's own of 2022 knows no systrap.
# Ubuntu 24.04's of August 2023 has systrap, but cannot make a root read-only that was mounted nosuid and nodev
# beforehand (EPERM: it drops the locked flags), and Covenant mounts every source so.
OLDEST = "0.0~20240729"

DEADLINE_SECONDS = 60


# As Covenant does it: the source is mounted with its flags first, in a mount namespace that ends with the probe.
_MOUNT_FIRST = [
    *("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-ec"),
    'mount --rbind / "$1"; mount -o remount,bind,ro,nosuid,nodev "$1"; shift; exec "$@"',
    "sh",
]


# Enough children to wait for: of builds with Go 1.25, `true` alone found one bad start in thirty, this all of fifteen.
_PROGRAM = "i=0; while [ $i -lt 40 ]; do /bin/true & wait $! || exit 1; i=$((i+1)); done"


@dataclasses.dataclass(frozen=True)
class Probe:
    """The result of a probe: the binary, and the reason why it does not work (None: it works)."""

    path: str | None
    problem: str | None

    @property
    def works(self) -> bool:
        return self.problem is None


def probe() -> Probe:
    """Start a sandbox with the runsc that Covenant would use here."""
    for place in PLACES:
        if os.path.exists(place):
            problem = _start(place)
            return Probe(place, None if problem is None else f"{place}: {problem}")
    return Probe(None, "there is no runsc")


def _start(binary: str) -> str | None:
    """Run a few processes in a sandbox of `binary` without network, cgroups or host writes."""
    if os.geteuid() != 0:
        return "starting a sandbox needs root"
    info = os.stat(binary)
    if info.st_uid != 0 or info.st_mode & 0o022:
        return "not owned by root, or writable by others"
    config = {
        "ociVersion": "1.0.2",
        "process": {
            "args": ["/bin/sh", "-c", _PROGRAM],
            "cwd": "/",
            "env": ["PATH=/usr/bin:/bin"],
            "user": {"uid": 65534, "gid": 65534},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }
    flags = ["--platform=systrap", "--network=none", "--ignore-cgroups", "--overlay2=all:memory"]
    name = f"covenant-probe-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="covenant-probe-") as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        rootfs = pathlib.Path(folder) / "rootfs"
        rootfs.mkdir()
        base = [binary, f"--root={folder}/state", *flags]
        process = subprocess.Popen(
            [*_MOUNT_FIRST, str(rootfs), *base, "run", f"--bundle={folder}", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, err = process.communicate(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            # runsc run's children carry a parent-death signal; the state is then cleared by delete.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            _delete([*base, "delete", "--force", name])
            return f"did not end within {DEADLINE_SECONDS} s"
    if process.returncode != 0:
        last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        return f"status {process.returncode}: {last[0][:300]}"
    return None


def _delete(command: list[str]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
