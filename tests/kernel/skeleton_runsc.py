"""Run one command under real runsc in a root that sandbox.rootfs.skeleton made: only that root, /proc, /dev and a
tmpfs.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from policy.host import Closure
from sandbox.rootfs import skeleton as rootfs_skeleton

MOUNT_POINTS: tuple[rootfs_skeleton.MountPoint, ...] = (
    ("/proc", "dir"),
    ("/dev", "dir"),
    ("/sys", "dir"),
    ("/tmp", "dir"),
    ("/workspace", "dir"),
)
_DEADLINE_SECONDS = 90


def run(
    root: Path,
    argv: Sequence[str],
    *,
    binds: Mapping[str, Path] | None = None,
    seccomp: Mapping[str, object] | None = None,
    stdin: bytes = b"",
) -> subprocess.CompletedProcess[bytes]:
    """Start ``argv`` as uid 65534 without capabilities; ``binds`` are read-only host paths by place inside."""
    mounts: list[dict[str, object]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777", "size=16m"]},
    ]
    for inside, outside in (binds or {}).items():
        mounts.append({"destination": inside, "type": "bind", "source": str(outside), "options": ["rbind", "ro"]})
    linux: dict[str, object] = {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]}
    if seccomp is not None:
        linux["seccomp"] = seccomp
    document = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 65534, "gid": 65534},
            "args": list(argv),
            "env": ["PATH=/usr/bin:/bin", "HOME=/tmp", "LANG=C.UTF-8"],
            "cwd": "/tmp",
            "noNewPrivileges": True,
            "capabilities": {},
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": mounts,
        "linux": linux,
    }
    with tempfile.TemporaryDirectory(prefix="skeleton-") as folder:
        Path(folder, "config.json").write_text(json.dumps(document))
        flags = ["--platform=systrap", "--network=none", "--ignore-cgroups", "--overlay2=none", "--oci-seccomp"]
        command = ["/usr/bin/runsc", f"--root={folder}/state", *flags, "run", f"--bundle={folder}"]
        name = f"skeleton-{os.getpid()}-{secrets.token_hex(4)}"
        process = subprocess.Popen(
            [*command, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(stdin, timeout=_DEADLINE_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            subprocess.run([command[0], command[1], "delete", "--force", name], capture_output=True, timeout=30)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def skeleton(
    store: rootfs_skeleton.Skeletons, *closures: Closure, also: Sequence[rootfs_skeleton.MountPoint] = ()
) -> Path:
    return store.get(closures, [*MOUNT_POINTS, *also])
