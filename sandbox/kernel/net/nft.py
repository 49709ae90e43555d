"""The nft program: a ruleset checked, then applied in one transaction, in the calling thread's network namespace.

Never for single elements of a set: the program takes ten times as long as a message of our own (sandbox-facts).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from policy import errors

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
# The first ruleset of a machine waits for a dozen kernel modules.
_SECONDS = 120


def apply(binary: Path, text: bytes, *, checked: bool = True) -> None:
    """Check the whole text (``nft -c``), then apply it: all of it or nothing. A constant of ours needs no check.

    Raises:
        errors.KernelError: Raised when nft or the kernel refuses it. Nothing is changed then.
    """
    for arguments in ([["-c", "-f", "-"]] if checked else []) + [["-f", "-"]]:
        _run(binary, arguments, text)


def listed(binary: Path, *what: str) -> bytes:
    """Return the output of ``nft -j list WHAT``: the kernel's own view, as JSON.

    Raises:
        errors.KernelError: Raised when the object does not exist, or nft does not answer.
    """
    return _run(binary, ["-j", "list", *what])


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
            start_new_session=True,  # Ctrl-C must reach only the process that removes the rules, not nft
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise errors.KernelError(f"`{binary}` does not answer", where=str(binary)) from e
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = "".join(c if c.isprintable() else " " for c in said[0])[:300] if said else f"status {done.returncode}"
        raise errors.KernelError(f"nft {' '.join(arguments)}: {reason}", where=str(binary))
    return done.stdout
