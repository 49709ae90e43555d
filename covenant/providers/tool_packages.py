"""The signed packages that entries ``[[mcp.server]]`` name: their directories, and the tools that they pin and grant.

Each is read by a process of its own (``sandbox.storage.package_process``), since its path may be on a file system that
does not answer. No signal ends a process that waits for that file system, and no process ends before its last thread.
So the daemon gives the process up, and starts no second one while the first is there.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from covenant.visible import visible
from policy import errors
from policy.manifest import parse
from policy.manifest.tools import checks, document
from policy.manifest.tools.document import Tool
from policy.package import MANIFEST_NAME

_MODULE: Final = "sandbox.storage.package_process"
_CHUNK: Final = 1 << 16
# Both files in base64, with room for their names or an error.
_MOST: Final = 4 * document.MAX_BYTES
# For a process that has sent all to end.
_END_SECONDS: Final = 5.0
# Processes that were given up. A reference keeps each until it is reaped.
_LEFT: Final = set[subprocess.Popen[bytes]]()


class ToolPackage:
    """The package of one entry. One task reads it at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader: subprocess.Popen[bytes] | None = None

    async def pins(self, *, seconds: float) -> dict[str, Tool]:
        """Return the granted tools of its tools.json, by the name that its endpoint has for each.

        Raises:
            As ``opened``.
        """
        directory, pins = await self.opened(seconds=seconds)
        os.close(directory)
        return pins

    async def opened(self, *, seconds: float) -> tuple[int, dict[str, Tool]]:
        """Return a descriptor of its directory, which the caller closes, and its pins.

        Raises:
            errors.HangingError: its file system did not answer in this time.
            errors.CovenantError: it cannot be read, or has no tools.json.
        """
        _reap()
        if self._reader in _LEFT:
            raise self._hangs()
        with contextlib.ExitStack() as stack:
            directory, files = await self._read(stack, seconds)
            pins = await anyio.to_thread.run_sync(pinned, files)
            stack.pop_all()
            return directory, pins

    async def _read(self, stack: contextlib.ExitStack, seconds: float) -> tuple[int, dict[str, bytes]]:
        """Return the descriptor, which ``stack`` closes, and the files."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._reader = reader = _started(self._path, theirs)
            try:
                with anyio.move_on_after(seconds):
                    raw, directory = await _received(ours, stack)
                    await _ended(reader)
                    return directory, _files(raw)
            finally:
                # One that its file system holds dies when that answers.
                reader.kill()
                if reader.poll() is None:
                    _LEFT.add(reader)
        raise self._hangs()

    def _hangs(self) -> errors.HangingError:
        return errors.HangingError(
            "the file system of the package does not answer",
            hint="unmount it, or take the entry out of secrets.toml; it is tried again",
            where=visible(str(self._path)),
        )


def pinned(files: Mapping[str, bytes]) -> dict[str, Tool]:
    """Return the granted tools of a package's tools.json, by the name that its endpoint has for each.

    The daemon's own tools that a package declares are left out: a session would lead back here.

    Raises:
        errors.CovenantError: agent.toml or tools.json is refused, or there is no tools.json.
    """
    manifest, raw = parse.parse(files.get(MANIFEST_NAME, b"")), files.get(document.FILE)
    if raw is None:
        raise errors.PackageError(f"the package has no `{document.FILE}`", hint="docs/tools.md says what it holds")
    tools = document.parse(raw)
    return {
        f"{server.alias}__{tool.name}": tool
        for server in tools.servers
        if server.transport != "daemon"
        for tool in server.tools
        if not checks.why_not(manifest, tools, server.uri(tool), tool.side_effect_class)
    }


def _started(path: Path, theirs: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-m", _MODULE, str(path), MANIFEST_NAME, document.FILE]
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=nothing, stderr=nothing, cwd="/", env=dict[str, str]()
        )
    except OSError as e:
        raise errors.ServiceError(f"the reader of a package cannot be started: {e.strerror}") from e


async def _received(sock: socket.socket, stack: contextlib.ExitStack) -> tuple[bytes, int]:
    """Return what the process sends until it ends, and its descriptor, -1 without one. ``stack`` closes it."""
    sock.setblocking(False)
    raw, directory = bytearray(), -1
    while len(raw) <= _MOST:
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


async def _ended(reader: subprocess.Popen[bytes]) -> None:
    """Wait briefly for a process that has sent all."""
    with anyio.move_on_after(_END_SECONDS):
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
            raise errors.restored(found["error"])
        return {name: base64.b64decode(data) for name, data in found["files"].items()}
    except (ValueError, KeyError, AttributeError, TypeError, binascii.Error):
        raise errors.ServiceError("the reader of a package ended before its answer") from None


def _reap() -> None:
    for one in [one for one in _LEFT if one.poll() is not None]:
        _LEFT.discard(one)
