"""The package of an entry `[[mcp.server]]` on a file system that does not answer: the daemon gives it up, lists its
other tools, and ends. The file system is a real FUSE server (hanging_server.py)."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from covenant.providers import tool_packages
from covenant.providers.tool_packages import ToolPackage
from covenant.wire import client
from policy import errors
from tests import tools_kit
from tests.daemon.test_lifecycle import process
from tests.kernel import hanging_files
from tests.kernel.hanging_files import Hanging

pytestmark = pytest.mark.anyio

ENTRY = '[[mcp.server]]\nname = "full"\npackage = "{place}"\n'
SECONDS = 60


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Hanging]:
    source = tools_kit.written(tmp_path / "package", tools_kit.package(tools_kit.FULL))
    with hanging_files.mounted(source, tmp_path / "hangs") as made:
        yield made


async def test_hanging_package_is_given_up_and_read_once_it_answers(files: Hanging) -> None:
    one = ToolPackage(files.place)
    pins = list(await one.pins(seconds=SECONDS))
    assert pins
    files.hang("OPENDIR")
    with pytest.raises(errors.HangingError, match="does not answer"):
        await one.pins(seconds=2)
    files.await_hung()
    (left,) = tool_packages._LEFT
    # No second process waits beside the first.
    for _ in range(3):
        with pytest.raises(errors.HangingError):
            await one.pins(seconds=SECONDS)
    assert {left} == tool_packages._LEFT
    files.answer()
    found: list[str] = []
    with anyio.fail_after(SECONDS):
        while not found:
            with contextlib.suppress(errors.HangingError):
                found = list(await one.pins(seconds=SECONDS))
            await anyio.sleep(0.1)
    assert found == pins
    assert set() == tool_packages._LEFT


def test_daemon_starts_lists_and_ends_with_hanging_package(files: Hanging, tmp_path: Path, clone: pathlib.Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "secrets.toml").write_text(ENTRY.format(place=files.place))
    (home / "secrets.toml").chmod(0o600)
    files.hang("OPENDIR")
    with process(home, clone) as daemon:
        files.await_hung()
        with client.connected(home, answer_seconds=SECONDS) as one:
            assert [tool["name"] for tool in one.ask("list_tools")["tools"]] == ["clock", "echo"]
        # It ends while the file system hangs, and its home is free for the next one.
        status, said = daemon.end()
        assert status == 0, said
    with process(home, clone) as daemon:
        assert daemon.end()[0] == 0
    files.answer()
