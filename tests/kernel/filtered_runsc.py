"""The plain sandbox of plain_runsc with one thing added: a filter, so that what changes is what the filter does."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kernel import plain_runsc
from tests.kernel.plain_runsc import Mount, Result


def run(
    argv: Sequence[str],
    *,
    seccomp: Mapping[str, Any] | None,
    oci_seccomp: bool = True,
    files: Mapping[str, bytes] | None = None,
    mounts: Sequence[Mount] = (),
    stdin: bytes = b"",
    cwd: str = "/",
    uid: int = 65534,
    deadline_seconds: float = 120.0,
) -> Result:
    """Run `argv` as an unprivileged uid without capabilities.

    Args:
        seccomp: the value of linux.seccomp in config.json, or None for a bundle without it.
        oci_seccomp: whether runsc gets `--oci-seccomp`.
        files: absolute path inside to content.
    """
    with plain_runsc._scratch() as base:
        rootfs = plain_runsc._make_rootfs(base / "rootfs", files or {}, {})
        document: dict[str, Any] = plain_runsc.config(
            argv, mounts=mounts, cwd=cwd, uid=uid, gid=uid, capabilities=(), no_new_privileges=True,
            rootfs=str(rootfs),
        )  # fmt: skip
        if seccomp is not None:
            document["linux"]["seccomp"] = seccomp
        Path(base / "config.json").write_text(json.dumps(document))
        container = "filtered-" + secrets.token_hex(8)
        flags = [f"--root={base / 'state'}", "--platform=systrap", "--network=none", "--overlay2=none",
                 "--ignore-cgroups", "--host-uds=none", *(["--oci-seccomp"] if oci_seccomp else [])]  # fmt: skip
        command = [plain_runsc.find_runsc(), *flags, "run", f"--bundle={base}", container]
        with plain_runsc._process(command, container) as process:
            return plain_runsc._drain(process, stdin, deadline_seconds, 64 << 20)
