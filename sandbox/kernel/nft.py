"""The nft program: a ruleset checked, then applied in one transaction, in the calling thread's network namespace.

Never for single elements of a set: the program takes ten times as long as a message of our own (sandbox-facts).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from policy import errors

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_SECONDS = 30


def apply(binary: Path, text: bytes) -> None:
    """Check the whole text (``nft -c``), then apply it: all of it or nothing.

    Raises:
        errors.KernelError: nft or the kernel refuses it; nothing was changed.
    """
    for arguments in (["-c", "-f", "-"], ["-f", "-"]):
        _run(binary, arguments, text)


def listed(binary: Path, *what: str) -> bytes:
    """``nft -j list WHAT``: the kernel's own view, as JSON.

    Raises:
        errors.KernelError: there is no such thing, or nft does not answer.
    """
    return _run(binary, ["-j", "list", *what])


def shown(binary: Path, *what: str) -> str:
    """``nft list WHAT`` as text, for what the JSON leaves out.

    Raises:
        errors.KernelError: as ``listed``.
    """
    return _run(binary, ["list", *what]).decode("utf-8", "replace")


def _run(binary: Path, arguments: list[str], text: bytes = b"") -> bytes:
    try:
        done = subprocess.run(
            [binary, *arguments],
            input=text,
            env=_ENVIRONMENT,
            cwd="/",
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise errors.KernelError(f"`{binary}` does not answer", where=str(binary)) from e
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = "".join(c if c.isprintable() else " " for c in said[0])[:300] if said else f"status {done.returncode}"
        raise errors.KernelError(f"nft {' '.join(arguments)}: {reason}", where=str(binary))
    return done.stdout
