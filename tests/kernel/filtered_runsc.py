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
    flags: Sequence[str] = (),
) -> Result:
    """Run `argv` as an unprivileged uid without capabilities.

    Args:
        seccomp: the value of linux.seccomp in config.json, or None for a bundle without it.
        oci_seccomp: whether runsc gets `--oci-seccomp`.
        files: absolute path inside to content.
        flags: further flags of runsc.
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
        stated = [f"--root={base / 'state'}", "--platform=systrap", "--network=none", "--overlay2=none",
                 "--ignore-cgroups", "--host-uds=none", *(["--oci-seccomp"] if oci_seccomp else [])]  # fmt: skip
        command = [plain_runsc.find_runsc(), *stated, *flags, "run", f"--bundle={base}", container]
        with plain_runsc._process(command, container) as process:
            return plain_runsc._drain(process, stdin, deadline_seconds, 64 << 20)


# Makes the calls given as JSON on stdin, prints [result, errno] of each as JSON, and the Seccomp line.
CALLER = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
answers = []
for number, *arguments in json.load(sys.stdin):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(a) for a in arguments))
    answers.append([result, ctypes.get_errno()])
status = open("/proc/self/status").read()
print(json.dumps({"answers": answers, "seccomp": [l for l in status.splitlines() if l.startswith("Seccomp:")]}))
"""


def call(
    calls: Sequence[Sequence[int]], seccomp: Mapping[str, Any] | None, *, oci_seccomp: bool = True
) -> tuple[list[int], list[str]]:
    """Make system calls (number and arguments each) inside: the errno of each, 0 for success, and the Seccomp line."""
    done = run(
        ["/usr/bin/python3", "-I", "-c", CALLER],
        seccomp=seccomp, oci_seccomp=oci_seccomp, stdin=json.dumps([list(each) for each in calls]).encode(),
    )  # fmt: skip
    assert done.status == 0, done.stderr.decode()[-2000:]
    answer = json.loads(done.stdout)
    return [number if result == -1 else 0 for result, number in answer["answers"]], answer["seccomp"]


def errnos(calls: Sequence[Sequence[int]], seccomp: Mapping[str, Any] | None) -> list[int]:
    """The errno of each of these calls inside, 0 for success."""
    return call(calls, seccomp)[0]
