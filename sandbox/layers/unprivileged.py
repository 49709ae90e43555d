"""Run a program that unpacks foreign bytes as a user without rights, in a directory of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from policy import errors

NOBODY = 65534
_SECONDS = 1800
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """A directory that the user without rights owns; it is removed at the end of the block."""
    work = Path(tempfile.mkdtemp(prefix="covenant-layer-"))
    try:
        # The user reaches its directory through this one, and cannot list or change it.
        work.chmod(0o711)
        own = work / "own"
        own.mkdir()
        os.chown(own, NOBODY, NOBODY)
        yield own
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run(command: Sequence[str], place: Path, *, hint: str) -> str:
    """Run a program as the user without rights, in a directory of its own. Returns its stdout.

    Raises:
        errors.LayerToolError: Raised when it cannot be run or fails; the message has its last line, the hint is ours.
    """
    homes = dict.fromkeys(("HOME", "TMPDIR", "XDG_RUNTIME_DIR"), str(place))
    try:
        done = subprocess.run(
            command,
            cwd=place,
            env={**_ENVIRONMENT, **homes},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            umask=0o022,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as e:
        raise errors.LayerToolError(f"`{command[0]}` cannot be run: {e}", hint=hint) from e
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        last = next((line for line in reversed(lines) if line.startswith("E:")), lines[-1] if lines else "no message")
        raise errors.LayerToolError(f"{os.path.basename(command[0])} failed: {last[:300]}", hint=hint)
    return done.stdout.decode("utf-8", "replace")
