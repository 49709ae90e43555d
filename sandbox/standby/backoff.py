"""Which agents are not kept ready although their manifests ask for it, and when that is tried again.

Written by the supervisor that keeps instances (sandbox.serve.standby_pool), and of no meaning once it is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

from msgspec import Struct, structs

from sandbox.host import memory
from sandbox.standby import wanted
from sandbox.storage import atomic_file, json_cache

_NAME = "standby-retries"
_SUPERVISOR = "supervisor.lock"


class Retry(Struct, frozen=True):
    """``count`` instances of an agent have failed on end; ``restless`` where it ran and did not wait for its intent."""

    agent_id: str
    count: int
    restless: bool
    until_ms: int

    def line(self, now_ms: int) -> str:
        """In words."""
        why = "did not wait for its intent" if self.restless else f"{self.count} instances ended before their intent"
        return f"`{self.agent_id}` {why}: next try in {max(0, self.until_ms - now_ms + 999) // 1000} s"


def note(state: Path, agent_id: str, *, count: int, restless: bool, wait_seconds: float) -> None:
    """The next try of it comes in so many seconds."""
    until_ms = int((time.time() + wait_seconds) * 1000)
    json_cache.write(_place(state, agent_id), structs.asdict(Retry(agent_id, count, restless, until_ms)))


def over(state: Path, agent_id: str) -> None:
    """One of it was used, or none is asked for any more."""
    _place(state, agent_id).unlink(missing_ok=True)


def forget(state: Path) -> None:
    """A supervisor starts, and counts anew."""
    shutil.rmtree(state / _NAME, ignore_errors=True)


def waiting(state: Path, *, now_ms: int) -> list[Retry]:
    """Those whose next try is still to come; empty where no supervisor keeps instances.

    Raises:
        OSError: the state is not this user's to read.
    """
    if not atomic_file.held(state / _SUPERVISOR):
        return []
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = sorted(name for name in os.listdir(state / _NAME) if not name.startswith("."))
    read = (_read(state / _NAME / name) for name in names)
    return [one for one in read if one is not None and one.until_ms > now_ms]


def why_not_ready(state: Path, *, now_ms: int) -> list[str]:
    """Say why there may be fewer instances than are asked for: the machine has no room, and each try to come.

    Raises:
        OSError: the state is not this user's to read, or the kernel does not say its memory.
    """
    why = [one.line(now_ms) for one in waiting(state, now_ms=now_ms)]
    if wanted.wanted(state) and (lacks := memory.machine().lacks):
        why.insert(0, f"no more instances are made now: {lacks}")
    return why


def _read(path: Path) -> Retry | None:
    found = json_cache.read(path)
    try:
        return None if found is None else Retry(**found)
    except TypeError:
        return None


def _place(state: Path, agent_id: str) -> Path:
    return state / _NAME / f"{hashlib.sha256(agent_id.encode()).hexdigest()}.json"
