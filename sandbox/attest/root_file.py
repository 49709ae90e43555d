"""Check the EROFS file that has the root of a sandbox: the sandbox holds it open, and its bytes are those made.

    (1) the sandbox's process holds a file of this device and inode open        /proc/PID/fd
    (2) its size, mode, owner and times are those of the start                  they hold for the bytes too
    (3) where they differ, the bytes are read and hashed: a name that was removed or replaced changes no byte of it
    (4) no process has it open for writing: writes to a mapped page change no time       fcntl(2), F_SETLEASE

The annotations of the configuration name the file (policy.decompile.live). The gofer has no root from the host then.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Final

from policy.prove.live import Layer, Standing
from sandbox.attest.reference import RootFile
from sandbox.kernel.procfs import Binary
from sandbox.rootfs import erofs_image

NAME: Final = "root"
# A descriptor that is moved during a listing may be in neither place. Once, on a loaded machine, one look found none in
# a run that was sound when it was repeated.
_LOOKS, _AGAIN_SECONDS = 3, 0.05


def judge(made: RootFile, sandbox: int, digests: dict[Binary, str]) -> Iterator[Layer]:
    """Yield the one finding about the root of the sandbox, a process id. ``digests`` remembers files by identity."""
    place = _held(sandbox, made)
    for _ in range(_LOOKS - 1):
        if place is None:
            time.sleep(_AGAIN_SECONDS)
            place = _held(sandbox, made)
    if place is None:
        yield Layer(NAME, Standing.WIDER, f"{made.describe()} held open by the sandbox", "it holds no such file")
        return
    with _opened(place) as fd:
        if erofs_image.written(fd):
            yield Layer(NAME, Standing.WIDER, made.describe(), "a process has it open for writing")
            return
        found = _digest(fd, made, digests)
    if found == made.digest:
        yield Layer(NAME, Standing.EQUAL, made.describe(), made.describe())
    else:
        yield Layer(NAME, Standing.WIDER, made.describe(), f"bytes of sha256 {found}")


def _held(pid: int, made: RootFile) -> str | None:
    """Return the descriptor of a process, as a path of /proc, that has the file."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        place = f"/proc/{pid}/fd/{name}"
        try:
            info = os.stat(place)
        except FileNotFoundError:
            continue  # the sandbox closes descriptors while they are listed
        if (info.st_dev, info.st_ino) == (made.device, made.inode):
            return place
    return None


@contextlib.contextmanager
def _opened(place: str) -> Iterator[int]:
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _digest(fd: int, made: RootFile, digests: dict[Binary, str]) -> str:
    info = os.fstat(fd)
    if erofs_image.identity(info).decode() == made.line:
        return made.digest
    key = Binary(info.st_dev, info.st_ino, info.st_ctime_ns, info.st_size)
    if key not in digests:
        digests[key] = erofs_image.digest(fd)
    return digests[key]
