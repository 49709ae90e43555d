"""Where the daemon looks for its supervisor, and what runs what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from covenant.runtime import build
from covenant.runtime.hermes import Hermes
from covenant.runtime.supervisor_client import Supervised
from covenant.settings import Projection, Settings
from covenant.wire.types import AgentId
from policy import errors
from policy.manifest import agent
from sandbox.serve.api import paths

pytestmark = pytest.mark.anyio


class Log:
    async def append(self, kind: str, fields: Mapping[str, Any], issuer: AgentId | None = None) -> str:
        raise AssertionError


def test_socket_named_is_only_one() -> None:
    settings = Settings(home=Path("/h"), state=Path("/s"), socket=Path("/x.sock"))
    assert build.sockets(settings) == ["/x.sock"]


def test_state_s_socket_comes_before_machine_s() -> None:
    assert build.sockets(Settings(home=Path("/h"))) == ["/h/supervisor/supervisor.sock", paths.SYSTEM_SOCKET]
    assert build.sockets(Settings(home=Path("/h"), state=Path("/s")))[0] == "/s/supervisor.sock"


async def test_every_runtime_of_manifest_has_its_runner(tmp_path: Path) -> None:
    async with build.opened(Settings(home=tmp_path), audit=Log(), now_ms=lambda: 0) as runtime:
        assert isinstance(runtime.supervised, Supervised)
        assert isinstance(runtime.hermes, Hermes)
        assert runtime.runners.approving is runtime.hermes
        assert set(runtime.runners._runners) == set(get_args(agent.Runtime))
        with pytest.raises(errors.HermesUnconfiguredError):
            await runtime.hermes.probe()


async def test_run_that_its_budget_ends_has_grace_that_was_set(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, projection=Projection(preempt_grace_ms=7))
    async with build.opened(settings, audit=Log(), now_ms=lambda: 0) as runtime:
        assert runtime.supervised._grace_ms == 7


async def test_address_of_hermes_that_cannot_be_used_ends_start(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, hermes_base_url="http://user:secret@host/v1")
    with pytest.raises(errors.SettingError) as raised:
        async with build.opened(settings, audit=Log(), now_ms=lambda: 0):
            pass
    assert "secret" not in str(raised.value)
