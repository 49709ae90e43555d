"""Runs probes by name and says how each ended.

The intent's text is a probe's id, or `batch:ID,ID,...`. The answer's text is JSON: one object
{"probe", "outcome", "errno", "detail"}, or a list of them. Outcomes:

    succeeded  the forbidden thing was done
    blocked    it was not, and `errno` (a name, or null where the kernel gave none) says how
    killed     the probe's process was ended by a signal
    hung       the probe did not end within its time
    broken     the probe itself is wrong; counts as neither, so that a bug never looks like a wall
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

Probe = Callable[[], str]

PROBES: dict[str, Probe] = {}
ALONE: set[str] = set()
DEADLINE_SECONDS = 60.0  # a bound, not a measure: a virtual machine without acceleration is slow
_ANSWER_BYTES = 1 << 16


class Blocked(Exception):
    """The forbidden thing did not happen although no call failed."""


def probe(name: str, *, alone: bool = False) -> Callable[[Probe], Probe]:
    """Enter a function as probe `name`: it returns what it achieved, or raises OSError or `Blocked`.

    `alone`: it may take the whole process with it, so it is never run in a batch or in a child.
    """

    def enter(function: Probe) -> Probe:
        if name in PROBES:
            raise ValueError(f"two probes are called {name}")
        PROBES[name] = function
        if alone:
            ALONE.add(name)
        return function

    return enter


def result(name: str, outcome: str, error: int | None, detail: str) -> dict[str, object]:
    """One row of the answer."""
    return {"probe": name, "outcome": outcome, "errno": errno.errorcode.get(error or 0), "detail": detail[:300]}


def attempt(name: str) -> dict[str, object]:
    """Run one probe in this process."""
    try:
        return result(name, "succeeded", None, PROBES[name]())
    except OSError as error:
        return result(name, "blocked", error.errno, str(error))
    except Blocked as error:
        return result(name, "blocked", None, str(error))
    except BaseException as error:
        return result(name, "broken", None, f"{type(error).__name__}: {error}")


def isolated(name: str) -> dict[str, object]:
    """Run one probe in a child, so that what it does to its own process ends with it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.write(writer, json.dumps(attempt(name)).encode()[:_ANSWER_BYTES])
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    answer, hung = _collect(reader)
    os.close(reader)
    if hung:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if hung:
        return result(name, "hung", None, f"no answer within {DEADLINE_SECONDS:g} s")
    if os.WIFSIGNALED(status):
        return result(name, "killed", None, f"signal {os.WTERMSIG(status)}")
    row: dict[str, object] = json.loads(answer) if answer else result(name, "broken", None, "no answer")
    return row


def _collect(reader: int) -> tuple[bytes, bool]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    answer = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return answer, True
        chunk = os.read(reader, _ANSWER_BYTES)
        if not chunk:
            return answer, False
        answer += chunk


def answer(text: str) -> object:
    """The rows for one intent text."""
    if text.startswith("batch:"):
        names = [name for name in text.removeprefix("batch:").split(",") if name]
        return [_one(name, batch=True) for name in names]
    return _one(text, batch=False)


def _one(name: str, *, batch: bool) -> dict[str, object]:
    if name not in PROBES:
        return result(name, "broken", None, "no probe of this package has that name")
    if name in ALONE:
        return result(name, "broken", None, "this probe runs alone") if batch else attempt(name)
    return isolated(name)


def main() -> None:
    """One JSON line in, one JSON line out."""
    text = json.loads(sys.stdin.readline())["text"].strip()
    sys.stdout.write(json.dumps({"text": json.dumps(answer(text)), "sources": []}) + "\n")
