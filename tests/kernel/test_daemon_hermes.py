"""The supervisor's trust alone decides if a package is sent to a Hermes API, end to end; the daemon's never does.

A real supervisor, a real daemon on its socket, and a double of the API over real HTTP.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.keys import signing
from covenant.runtime import build
from policy import errors
from tests import daemon_kit, hermes_double
from tests.daemon_kit import Daemon
from tests.hermes_double import HermesDouble
from tests.kernel import serving
from tests.kernel.serving import Served
from tests.kernel.world import World

pytestmark = pytest.mark.anyio

MANIFEST = """\
[agent]
id = "{id}"
name = "{id}"
version = "1.0.0"
runtime = "hermes"
[resources]
network = "off"
[hermes]
tools_allowed = []
approval_policy = "auto-deny"
"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base)) as made:
        yield made
        made.quiet()


@pytest.fixture
def home(served: Served, tmp_path: Path) -> Path:
    """A daemon's home whose own copy of the trust root trusts only a stranger.

    ``strange`` is the one package that the daemon by itself would send.
    """
    home, world, stranger = tmp_path / "home", served.world, Ed25519PrivateKey.generate()
    for directory in (home, home / "trust", home / "agents"):
        directory.mkdir(mode=0o700)
    root = home / "trust" / "root.json"
    root.write_bytes(signing.new_root("stranger", stranger, now_ms=time.time_ns() // 1_000_000))
    root.chmod(0o600)
    for name in ("signed", "unsigned", "strange", "tampered"):
        package = world.package({"agent.toml": MANIFEST.format(id=name)}, name=name)
        if name != "unsigned":
            world.sign(package, **({"key": stranger} if name == "strange" else {}))
        shutil.copytree(package, home / "agents" / name)
        shutil.rmtree(package)
    (home / "agents" / "tampered" / "more.txt").write_text("nobody signed this")
    return home


@contextlib.asynccontextmanager
async def _daemon(home: Path, double: HermesDouble, **settings: Any) -> AsyncIterator[Daemon]:
    api: dict[str, Any] = {"hermes_base_url": double.url, "hermes_api_key": hermes_double.KEY}
    async with daemon_kit.running(home, **api, **settings) as daemon:
        await daemon.grant("memory.write")
        yield daemon


async def _refused(daemon: Daemon, agent_id: str) -> str:
    with pytest.raises(errors.CovenantError) as raised:
        await daemon.ask("submit_intent", text="hi", agent=agent_id)
    return raised.value.code


async def test_supervisor_s_trust_decides_what_is_sent_to_hermes(served: Served, home: Path) -> None:
    async with hermes_double.serving() as double:
        async with _daemon(home, double, state=home / "elsewhere", socket=served.path) as daemon:
            result = await daemon.ask("submit_intent", text="hi", agent="signed")
            assert (result["status"], result["text"]) == ("ok", "You said: hi")
            assert len(double.runs) == 1
            for name, error in {
                "unsigned": errors.UnsignedError,
                "strange": errors.UnknownKeyError,
                "tampered": errors.DigestMismatchError,
            }.items():
                assert await _refused(daemon, name) == error.code
        # The daemon now knows that there is a supervisor. Without it no package is sent, also after a restart of the
        # daemon.
        assert (home / build.SUPERVISED).is_file()
        async with _daemon(home, double, state=home / "elsewhere") as daemon:
            for name in ("signed", "strange"):
                assert await _refused(daemon, name) == errors.NoSupervisorError.code
        assert len(double.runs) == 1


async def test_only_where_there_never_was_supervisor_daemon_s_own_copy_decides(home: Path) -> None:
    """The control: by itself the daemon sends the very package that the supervisor refuses, and not the other."""
    async with hermes_double.serving() as double, _daemon(home, double, state=home / "elsewhere") as daemon:
        assert (await daemon.ask("submit_intent", text="hi", agent="strange"))["status"] == "ok"
        assert await _refused(daemon, "signed") == errors.UnknownKeyError.code
        assert len(double.runs) == 1
