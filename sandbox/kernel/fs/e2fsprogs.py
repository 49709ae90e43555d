"""Programs of e2fsprogs (mkfs.ext4, e2fsck, resize2fs), which make, check and resize images of ext4."""

from __future__ import annotations

import os
import subprocess
from typing import Final

from policy import errors

_PLACES: Final = ("/usr/sbin", "/sbin")


def run(name: str, *arguments: str, seconds: int, accepted: tuple[int, ...] = (0,)) -> None:
    """Run a program; the last of ``arguments`` is the image.

    Raises:
        errors.KernelError: there is none, it takes longer than ``seconds``, or its status is not ``accepted``. With
            a hint where this host lacks it.
    """
    program = next((f"{place}/{name}" for place in _PLACES if os.access(f"{place}/{name}", os.X_OK)), None)
    if program is None:
        raise errors.KernelError(f"this host has no {name}", hint="apt-get install e2fsprogs")
    try:
        done = subprocess.run(
            [program, *arguments],
            env={"LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise errors.KernelError(f"{name} took more than {seconds} s") from e
    if done.returncode not in accepted:
        said = (done.stderr.strip() or done.stdout).decode("utf-8", "replace").replace(f"{arguments[-1]}: ", "")
        lines = [line for line in said.splitlines() if line.strip() and not line.startswith(f"{name} 1.")]
        raise errors.KernelError(f"{name} failed: {lines[0].strip()[:300] if lines else 'no message'}")
