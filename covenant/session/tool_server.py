"""Ask the tool servers of a package what they advertise, each in a sandbox of its own (``covenant tools serve``)."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from covenant.session import proxy_loop
from policy import errors
from policy.manifest.tools import advertised, http_relay
from policy.manifest.tools.advertised import AdvertisedTool
from policy.manifest.tools.checks import Finding
from policy.manifest.tools.document import Server, ToolManifest
from policy.rules import tool_calls
from sandbox.network.tools import mcp_session
from sandbox.network.tools.guard import ToolGuard
from sandbox.network.tools.mcp_session import McpSession, ToolCall
from sandbox.network.tools.proxy import ToolProxy

_CHUNK: Final = 64 * 1024
_STDERR_BYTES: Final = 4 * 1024
# A server whose stdin has ended may take so long to end, and so long again after SIGTERM.
_GRACE_SECONDS: Final = 3.0
_START_SECONDS: Final = 60.0
_LATE: Final = "it did not answer in time"


def verify(
    package: Path, tools: ToolManifest, *, seconds: int, of_daemon: Sequence[AdvertisedTool]
) -> tuple[Finding, ...]:
    """Start each server of a package, or its relay, and compare what it advertises with tools.json.

    ``seconds`` is the time for one server, with its start. ``of_daemon`` are the tools of the daemon, which is not
    started.

    Raises:
        errors.PrivilegeError: this process is not root.
    """
    if os.geteuid() != 0 and any(server.transport != "daemon" for server in tools.servers):
        raise errors.PrivilegeError(
            "--live needs root: it starts sandboxes", hint="run it with sudo, and give COVENANT_HOME"
        )
    return tuple(
        finding
        for server in tools.servers
        for finding in (
            advertised.compare(tools, server, of_daemon)
            if server.transport == "daemon"
            else _verified(package, tools, server, seconds)
        )
    )


def _verified(package: Path, tools: ToolManifest, server: Server, seconds: int) -> Iterator[Finding]:
    where = tools.where(("servers", tools.servers.index(server), "alias"))
    if names := http_relay.secrets(server):
        message = f"server `{server.alias}` is asked with the secret of {', '.join(names)}, which a signed run is given"
        yield Finding("not_asked", message, "run the agent: its first call compares what the server advertises", where)
        return
    try:
        session = ask(package, server.alias, McpSession(over_http=server.transport == "http"), seconds=seconds)
    except errors.ToolServerError as e:
        yield Finding("server_failed", f"server `{server.alias}`: {e}", e.hint, where)
        return
    yield from advertised.compare(tools, server, session.tools)


def call(
    package: Path, tools: ToolManifest, guard: ToolGuard, uri: str, arguments: dict[str, Any], *, seconds: float | None
) -> dict[str, Any]:
    """Call a declared tool of a server without secrets and return its result, ``content`` and perhaps ``isError``.

    The guard checks the call before the server is started; what it advertises is compared before it is called.
    ``seconds`` may shorten the time of the call.

    Raises:
        errors.ToolDeniedError, errors.ToolArgumentsError, errors.UsageError: as ``ToolGuard.check``.
        errors.ToolServerError: the server failed, or advertises something else than tools.json declares.
    """
    found = tool_calls.find(tools, uri)
    if found is not None and http_relay.secrets(found[0]):
        raise errors.UsageError(f"`{uri}` is asked with a secret of a header", hint="a signed run alone is given it")
    allowed = guard.check(uri, arguments, seconds=seconds)
    drift: list[Finding] = []

    def approve(found: Sequence[AdvertisedTool]) -> None:
        drift.extend(advertised.compare(tools, allowed.server, found))
        for finding in drift:
            raise errors.ToolServerError(finding.message, hint=finding.hint)

    session = McpSession(ToolCall(allowed.tool.name, arguments), approve, over_http=allowed.server.transport == "http")
    most = allowed.seconds
    try:
        ask(package, allowed.server.alias, session, seconds=_START_SECONDS + most, answer_seconds=most)
    except LateError:
        raise guard.late(allowed) from None
    except errors.ToolServerError:
        guard.failed(allowed, "drift" if drift else "server_failed")
        raise
    return guard.answered(allowed, session.result, session.result_bytes)


def serve(package: Path, alias: str, proxy: ToolProxy, *, seconds: float) -> int:
    """Hold a session between this process's stdin and stdout and a server, which is started for it.

    Returns 0 where the client ended it.

    Raises:
        errors.ToolServerError: the server ended, or does not speak MCP.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(_command(package, alias), stdin=pipe, stdout=pipe, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            return proxy_loop.relay(proxy, (process.stdin.fileno(), process.stdout.fileno()), (0, 1), seconds=seconds)
        finally:
            process.stdin.close()
            process.stdin = None
            acts: tuple[Callable[[], None], ...] = (lambda: None, process.terminate, process.kill)
            for act in acts:
                act()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
                    break


class LateError(errors.ToolServerError):
    """The server did not answer a call in its time."""


def _command(package: Path, alias: str) -> list[str]:
    return [sys.executable, "-m", "covenant", "tools", "serve", str(package), alias, "--bare"]


def ask(
    package: Path, alias: str, session: McpSession, *, seconds: float, answer_seconds: float | None = None
) -> McpSession:
    """Hold a session of at most ``seconds`` with a server of a package, which is started for it and ended afterwards.

    A call has ``answer_seconds`` from when it was sent.

    Raises:
        LateError: a call has no answer in its time.
        errors.ToolServerError: it did not start, did not answer in time, or does not speak MCP.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(_command(package, alias), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        streams = _Streams(process, time.monotonic() + seconds)
        try:
            _converse(streams, session, answer_seconds)
        except _EndedError as e:
            streams.end()
            if session.is_called and str(e) == _LATE:
                raise LateError(str(e)) from None
            said = streams.stderr.decode(errors="replace").strip() or "empty"
            raise errors.ToolServerError(str(e), hint=f"its stderr: {said}") from None
        finally:
            streams.end()
    return session


class _EndedError(Exception):
    """The server brings no more."""


def _converse(streams: _Streams, session: McpSession, answer_seconds: float | None) -> None:
    streams.send(session.start())
    buffer = b""
    while not session.done:
        lines = (buffer + streams.read()).split(b"\n")
        buffer = lines.pop()
        if len(buffer) > mcp_session.LINE_BYTES:
            raise _EndedError(f"it wrote a line of more than {mcp_session.LINE_BYTES} bytes")
        for line in lines:
            if not session.done:
                was_called = session.is_called
                streams.send(session.take(line))
                if session.is_called and not was_called and answer_seconds is not None:
                    streams.until(time.monotonic() + answer_seconds)


class _Streams:
    """The three pipes of a started server, until a time. ``stderr`` is the end of what it wrote there."""

    def __init__(self, process: subprocess.Popen[bytes], until: float) -> None:
        self._process, self._until = process, until
        self._pipes = [stream.fileno() for stream in (process.stdin, process.stdout, process.stderr) if stream]
        os.set_blocking(self._pipes[0], False)
        self._has_ended = False
        self.stderr = b""

    def until(self, moment: float) -> None:
        """Wait for the server until then, by the monotonic clock."""
        self._until = moment

    def send(self, data: bytes) -> None:
        """Send it. What the server writes to stdout meanwhile waits.

        Raises:
            _EndedError: the server reads no more, or the time is up.
        """
        while data:
            self._ready(writes=True)
            try:
                data = data[os.write(self._pipes[0], data) :]
            except BrokenPipeError:
                raise _EndedError("it ended before it had answered") from None

    def read(self) -> bytes:
        """Return what it wrote to stdout, at least one byte.

        Raises:
            _EndedError: it brings no more, or the time is up.
        """
        self._ready(writes=False)
        data = os.read(self._pipes[1], _CHUNK)
        if not data:
            raise _EndedError("it ended before it had answered")
        return data

    def _ready(self, *, writes: bool) -> None:
        """Wait until stdin takes bytes, or stdout has some. Reads stderr meanwhile."""
        stdin, stdout, stderr = self._pipes
        sources = [stderr] if writes else [stdout, stderr]
        while True:
            left = max(0.0, self._until - time.monotonic())
            can_read, can_write, _ = select.select(sources, [stdin] if writes else [], [], left)
            if not can_read and not can_write:
                raise _EndedError(_LATE)
            if stderr in can_read and not self._read_stderr():
                sources.remove(stderr)
            if can_write or stdout in can_read:
                return

    def _read_stderr(self) -> bytes:
        data = os.read(self._pipes[2], _CHUNK)
        self.stderr = (self.stderr + data)[-_STDERR_BYTES:]
        return data

    def end(self) -> None:
        """Close its stdin, wait for its end, and end it where it does not. What it still writes is dropped."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._process.stdin is not None:
            self._process.stdin.close()
            self._process.stdin = None  # communicate would flush it
        acts: tuple[Callable[[], None], ...] = (lambda: None, self._process.terminate, self._process.kill)
        for act in acts:
            act()
            try:
                _, rest = self._process.communicate(timeout=_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            self.stderr = (self.stderr + (rest or b""))[-_STDERR_BYTES:]
            return
