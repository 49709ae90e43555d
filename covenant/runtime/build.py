"""Build the runtime from the daemon's settings."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from covenant.runtime import package_signatures, supervisor_client
from covenant.runtime.hermes import Hermes, HermesLog
from covenant.runtime.hermes_api import HermesApi
from covenant.runtime.runner import Runners
from covenant.runtime.supervisor_client import Supervised
from covenant.settings import Settings
from policy.manifest import agent
from sandbox.serve.api import client

# A file in the home: a supervisor was reached once. From then on only a supervisor decides which signatures count.
SUPERVISED: Final = "supervised"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The runners by runtime name, and the two implementations."""

    runners: Runners
    supervised: Supervised
    hermes: Hermes


@asynccontextmanager
async def opened(
    settings: Settings, *, audit: HermesLog, now_ms: Callable[[], int], operator: str = "", sessions: int = 0
) -> AsyncIterator[Runtime]:
    """Yield the runtime of a daemon with the key ``operator``, which keeps so many ``sessions`` besides its runs.

    Neither the supervisor nor Hermes is contacted before the first run.

    Raises:
        errors.SettingError: the address of Hermes cannot be used.
    """
    sandboxes = Supervised(
        supervisor_client.connector(
            sockets(settings), named=settings.socket is not None, mark=settings.home / SUPERVISED
        ),
        now_ms=now_ms,
        grace_ms=settings.projection.preempt_grace_ms,
        most=supervisor_client.MOST_RUNS - sessions,
        operator=operator,
    )
    api = HermesApi(settings.hermes_base_url, settings.hermes_api_key) if settings.hermes_base_url else None
    here = functools.partial(
        package_signatures.verify, home=settings.home, state=_state(settings), host=os.uname().nodename, now_ms=now_ms
    )
    verify = functools.partial(package_signatures.ask_or_verify, ask=sandboxes.check, verify=here)
    async with Hermes(api, audit=audit, verify=verify, now_ms=now_ms) as hermes:
        by_runtime = dict.fromkeys(agent.SUBPROCESS_RUNTIMES, sandboxes)
        yield Runtime(Runners({**by_runtime, "hermes": hermes}, hermes, verify), sandboxes, hermes)


def sockets(settings: Settings) -> list[str]:
    """Return the paths where a supervisor may listen, as ``covenant run`` does: COVENANT_SOCKET, else the state's, else
    the machine's."""
    if settings.socket is not None:
        return [str(settings.socket)]
    return client.candidates(str(_state(settings)), given=settings.state is not None)


def _state(settings: Settings) -> Path:
    return settings.state or settings.home / "supervisor"
