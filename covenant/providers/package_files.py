"""Read files of a package directory by a process of its own (``sandbox.storage.package_process``).

The directory may be on a file system that does not answer. No signal ends a process that waits for that file system,
and no process ends before its last thread. So the daemon gives the process up, and starts no second one for the same
directory while the first is there (ADR 0152, ADR 0160).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import anyio

from covenant.visible import visible
from policy import errors

_MODULE: Final = "sandbox.storage.package_process"
_CHUNK: Final = 1 << 16
# For the names and the marks of the document, or an error.
_BEYOND_BYTES: Final = 1 << 16
# For a process that has sent all to end, and for one that was killed.
_END_SECONDS: Final = 5.0
_KILLED_SECONDS: Final = 2.0
# Processes that were given up, with the directory of each. A reference keeps one until it is reaped.
_LEFT: Final = dict[subprocess.Popen[bytes], Path]()


@contextlib.asynccontextmanager
async def opened(
    path: Path, wanted: Mapping[str, int], *, seconds: float
) -> AsyncIterator[tuple[int, dict[str, bytes]]]:
    """Open a package directory, and read those files of ``wanted`` that it has. ``wanted`` has the most bytes of each.
    The descriptor is closed at the end of the block.

    Raises:
        errors.HangingError: its file system did not answer in this time.
        errors.CovenantError: it cannot be read.
    """
    _reap()
    if path in _LEFT.values():
        raise _hangs(path)
    with contextlib.ExitStack() as stack:
        yield await _read(stack, path, wanted, seconds)


async def _read(
    stack: contextlib.ExitStack, path: Path, wanted: Mapping[str, int], seconds: float
) -> tuple[int, dict[str, bytes]]:
    """Return the descriptor, which ``stack`` closes, and the files."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            reader = _started(path, wanted, theirs)
        try:
            with anyio.move_on_after(seconds):
                raw, directory = await _received(ours, stack, 2 * sum(wanted.values()) + _BEYOND_BYTES)
                await _ended(reader, seconds=_END_SECONDS)
                return directory, _files(raw)
        finally:
            reader.kill()
            if reader.poll() is None:
                _LEFT[reader] = path
                # One that its file system holds dies when that answers, any other now.
                with anyio.CancelScope(shield=True):
                    await _ended(reader, seconds=_KILLED_SECONDS)
                _reap()
    raise _hangs(path)


def _hangs(path: Path) -> errors.HangingError:
    return errors.HangingError(
        "the file system of the package does not answer",
        hint="unmount it, or take the package away; it is tried again",
        where=visible(str(path)),
    )


def _started(path: Path, wanted: Mapping[str, int], theirs: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-m", _MODULE, str(path), *(f"{name}:{most}" for name, most in wanted.items())]
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=nothing, stderr=nothing, cwd="/", env=dict[str, str]()
        )
    except OSError as e:
        raise errors.ServiceError(f"the reader of a package cannot be started: {e.strerror}") from e


async def _received(sock: socket.socket, stack: contextlib.ExitStack, most: int) -> tuple[bytes, int]:
    """Return what the process sends until it ends, and its descriptor, -1 without one. ``stack`` closes it."""
    sock.setblocking(False)
    raw, directory = bytearray(), -1
    while len(raw) <= most:
        await anyio.wait_readable(sock)
        data, fds, _, _ = socket.recv_fds(sock, _CHUNK, 1)
        for fd in fds:
            os.set_inheritable(fd, False)
            stack.callback(os.close, fd)
            directory = fd
        if not data:
            break
        raw += data
    return bytes(raw), directory


async def _ended(reader: subprocess.Popen[bytes], *, seconds: float) -> None:
    """Wait briefly for a process that is about to end, and reap it."""
    with anyio.move_on_after(seconds):
        while reader.poll() is None:  # noqa: ASYNC110
            await anyio.sleep(0.01)


def _files(raw: bytes) -> dict[str, bytes]:
    """Read the document of the process.

    Raises:
        errors.CovenantError: it is an error, or none of an honest process: it was killed.
    """
    try:
        found: Any = json.loads(raw)
        if isinstance(found.get("error"), dict):
            error = errors.restored(found["error"])
            # Its path may have bytes that are no text: no answer of the daemon could carry these.
            error.where = visible(error.where)
            raise error
        return {name: base64.b64decode(data) for name, data in found["files"].items()}
    except (ValueError, KeyError, AttributeError, TypeError, binascii.Error):
        raise errors.ServiceError("the reader of a package ended before its answer") from None


def _reap() -> None:
    for one in [one for one in _LEFT if one.poll() is not None]:
        del _LEFT[one]
