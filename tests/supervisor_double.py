"""A supervisor that answers what a test says, over the real frames and a real socket, and runs nothing.

``tests/unit/covenant/runtime/test_supervisor_client.py`` stands on it; ``tests/kernel/test_daemon_runs.py`` asks the
same of the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from policy import errors
from policy.audit_log import chain, events
from sandbox import unix_wire

# The id of the log's key, and the issuer of its rows.
ORIGIN = "b" * 64
KERNELS_WORD = {"display": "uid7@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}

Document = Mapping[str, Any]
# What is answered to a run, given the request; None says nothing and waits until the client goes.
Act = Callable[[Document], Document | None]


def answer(request: Document, text: str, **fields: Any) -> dict[str, Any]:
    """The document of a run that went well."""
    return {
        "kind": "answer",
        "run_id": str(uuid.uuid4()),
        "intent_id": request.get("intent_id"),
        "agent_id": request["agent_id"],
        "policy_digest": "a" * 64,
        "result": {"text": text, "sources": [], "files": [], "runtime_events": []},
        "error": None,
        "stderr": "",
        "not_enforced": [],
        "unknown_sections": [],
        "denials": [],
        "timings": {},
        "usage": {"cpu_ms": 20, "memory_peak_bytes": 1 << 20, "wall_ms": 30},
        "exit_status": None,
        **fields,
    }


def told(request: Document, *lines: bytes, **fields: Any) -> dict[str, Any]:
    """The frame with the rows of a run: these lines as a log would have them from its record 7 on."""
    head, rows = chain.Head(count=7), []
    for number, line in enumerate(lines):
        anchor, head = head.advance(line, event_id=json.loads(line)["id"], timestamp_ms=number)
        rows.append([anchor.decode(), line.decode()])
    used = {"cpu_ms": 20, "memory_byte_ms": 30 << 20, "wall_ms": 30, "credits": 0}
    family = {"runs": 1, "unended": 0, "uncounted": 0, **used}
    return {"kind": "rows", "origin": ORIGIN, "rows": rows, "left_out": 0, "whole": True, "family": family, **fields}


def row(kind: str, run_id: str, **fields: Any) -> bytes:
    """A line of the supervisor's log."""
    event_id = str(uuid.uuid4())
    known = {"run_id": run_id, "agent_id": "a", "operator": None, **fields}
    return events.event_line(kind, known, event_id=event_id, issuer=KERNELS_WORD, now_ms=1)


def echoes(request: Document) -> Document:
    """An agent that says what it was asked."""
    return answer(request, f"{request['agent_id']}: {request['text']}")


class SupervisorDouble:
    """Listens at ``path`` while the block lasts; ``requests`` are those that came, each with the agent's id.

    ``tells`` gives the frame before an answer to a run, where that asks for rows; None where it sends none.
    """

    def __init__(
        self, path: Path, act: Act = echoes, *, most: int = 64, tells: Callable[..., Document | None] = told
    ) -> None:
        self.path, self.act, self.tells = path, act, tells
        self.requests: list[dict[str, Any]] = []
        self.gone: list[str] = []
        self._most = most
        self._live: dict[str, str] = {}
        self._turn = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Self:
        self._listener.bind(str(self.path))
        self._listener.listen(128)
        self._start(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        for one in (self._listener, *tuple(self._open)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            self._start(lambda connection=connection: self._serve(connection))  # type: ignore[misc]

    def _serve(self, connection: socket.socket) -> None:
        fds: list[int] = []
        with connection:
            try:
                raw = unix_wire.receive(
                    connection, max_bytes=unix_wire.REQUEST_BYTES, until=time.monotonic() + 10, fds=fds
                )
                if raw is None:
                    return
                request = json.loads(raw)
                said = self._answer(connection, request, fds)
                beside = self.tells(request) if said is not None and request.get("rows") else None
                if beside is not None:
                    unix_wire.send(connection, unix_wire.encode(beside), until=time.monotonic() + 10)
                if said is not None:
                    unix_wire.send(connection, unix_wire.encode(said), until=time.monotonic() + 10)
            except (unix_wire.FrameError, OSError):
                pass
            except errors.CovenantError as e:
                unix_wire.send(connection, unix_wire.encode(e.to_json()), until=time.monotonic() + 10)
            finally:
                self._open.discard(connection)
                for fd in fds:
                    os.close(fd)

    def _answer(self, connection: socket.socket, request: dict[str, Any], fds: list[int]) -> Document | None:
        if request["kind"] == "ps":
            return {"kind": "runs", "runs": [{"run_id": r, "intent_id": i} for r, i in dict(self._live).items()]}
        if request["kind"] == "operate":
            with self._turn:
                self.requests.append(request)
                if request["run"] not in self._live:
                    raise errors.NoRunError("no live run has that id")
                del self._live[request["run"]]
            return {"kind": "operated", "runs": [request["run"]]}
        return self._run(connection, request, fds)

    def _run(self, connection: socket.socket, request: dict[str, Any], fds: list[int]) -> Document | None:
        (directory,) = fds
        # As the real one: the package is read by the descriptor that came, and by nothing else.
        fd = os.open("agent.toml", os.O_RDONLY, dir_fd=directory)
        with os.fdopen(fd, "rb") as stream:
            manifest = stream.read().decode()
        request["agent_id"] = manifest.partition('id = "')[2].partition('"')[0]
        run_id = str(uuid.uuid4())
        with self._turn:
            if len(self._live) >= self._most:
                raise errors.BusyError("this user has as many requests open as one may have")
            self.requests.append(request)
            self._live[run_id] = str(request.get("intent_id"))
        unix_wire.send(
            connection, unix_wire.encode({"kind": "state", "state": "accepted"}), until=time.monotonic() + 10
        )
        try:
            said = self.act(request)
            if said is None:
                said = self._until_ended(connection, run_id, request)
            return said
        finally:
            with self._turn:
                self._live.pop(run_id, None)

    def _until_ended(self, connection: socket.socket, run_id: str, request: Document) -> Document | None:
        connection.settimeout(0.02)
        while run_id in self._live:
            try:
                connection.recv(1)
            except TimeoutError:
                continue
            except OSError:
                pass
            self.gone.append(str(request.get("intent_id")))
            return None
        error = errors.KilledError("ended by uid0@local: budget").to_json()
        return answer(request, "", result=None, error=error)
