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
from typing import Any

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
    image: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Start ``argv`` as uid 65534 without capabilities; ``binds`` are read-only host paths by place inside.

    ``image`` is an EROFS file that has the root; ``root`` is an empty directory then.
    """
    document = bundle_config(root, argv)
    for inside, outside in (binds or {}).items():
        bind = {"destination": inside, "type": "bind", "source": str(outside), "options": ["rbind", "ro"]}
        document["mounts"].append(bind)
    if seccomp is not None:
        document["linux"]["seccomp"] = seccomp
    if image is not None:
        annotations = {"source": str(image), "type": "erofs"}
        document["annotations"] = {f"dev.gvisor.spec.rootfs.{name}": value for name, value in annotations.items()}
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


def bundle_config(
    root: Path, argv: Sequence[str], *, uid: int = 65534, scratch: Sequence[str] = ("mode=1777", "size=16m")
) -> dict[str, Any]:
    """The config.json of a plain bundle, without filter or limit: ``argv`` as ``uid``, without capabilities.

    ``scratch`` are the options of the tmpfs at /tmp.
    """
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": uid, "gid": uid},
            "args": list(argv),
            "env": ["PATH=/usr/bin:/bin", "HOME=/tmp", "LANG=C.UTF-8"],
            "cwd": "/tmp",
            "noNewPrivileges": True,
            "capabilities": {},
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": list(scratch)},
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


def skeleton(
    store: rootfs_skeleton.Skeletons, *closures: Closure, also: Sequence[rootfs_skeleton.MountPoint] = ()
) -> Path:
    return store.get(closures, [*MOUNT_POINTS, *also])
