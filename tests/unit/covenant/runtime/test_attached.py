"""The pipes of a session that the console is attached to: filtered output, input without a reader, and the end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import pytest

from covenant.runtime import attached
from covenant.runtime.attached import AttachedTerminal, AttachmentPipes
from policy import errors
from sandbox.run_io import RESIZE

pytestmark = pytest.mark.anyio


class Shim:
    """The other ends of an attachment."""

    def __init__(self) -> None:
        self.pipes = AttachmentPipes()
        self.stdin, self.stdout, self.sizes = (os.dup(fd) for fd in self.pipes.theirs)
        self.pipes.release()
        self.terminal = AttachedTerminal("r", self.pipes, self._ended)

    @staticmethod
    async def _ended() -> Mapping[str, Any]:
        return {}


@pytest.fixture
async def shim() -> AsyncIterator[Shim]:
    one = Shim()
    yield one
    one.pipes.close()
    for fd in (one.stdin, one.stdout, one.sizes):
        if fd >= 0:
            os.close(fd)


async def _shown(shim: Shim) -> bytes:
    """Return all output, which has ended."""
    os.close(shim.stdout)
    shim.stdout = -1
    found = b""
    while (data := await shim.terminal.read()) is not None:
        found += data
    return found


async def test_output_is_filtered_across_reads(shim: Shim) -> None:
    os.write(shim.stdout, b"a\x1b]5")
    assert await shim.terminal.read() == b"a"
    os.write(shim.stdout, b"2;c;ZXZpbA==\x07b\x1b]52;c")
    assert await _shown(shim) == b"\x18b\x18"


async def test_large_output_comes_whole(shim: Shim) -> None:
    data = b"\x1b[1mx" * 10_000
    os.write(shim.stdout, data)
    assert await _shown(shim) == data


async def test_read_is_cancelled_without_loss(shim: Shim) -> None:
    with anyio.move_on_after(0) as limit:
        await shim.terminal.read()
    assert limit.cancelled_caught
    os.write(shim.stdout, b"later")
    assert await shim.terminal.read() == b"later"


async def test_input_and_size_arrive(shim: Shim) -> None:
    await shim.terminal.write(b"typed")
    shim.terminal.resize(30, 90)
    assert os.read(shim.stdin, 100) == b"typed"
    assert RESIZE.unpack(os.read(shim.sizes, 100)) == (30, 90)


async def test_agent_without_reader_gets_no_more(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "INPUT_SECONDS", 0.05)
    with pytest.raises(errors.ServiceError, match="reads no input"):
        await shim.terminal.write(b"x" * 1_000_000)
    for _ in range(50_000):
        shim.terminal.resize(1, 1)
    os.read(shim.stdin, 1_000_000)
    await shim.terminal.write(b"again")


async def test_writer_is_told_of_the_end(shim: Shim) -> None:
    """A number that was closed may be another file's at once: nothing is written to it."""
    async with anyio.create_task_group() as group:

        async def types() -> None:
            with pytest.raises(errors.ServiceError, match="has ended"):
                await shim.terminal.write(b"x" * 1_000_000)

        group.start_soon(types)
        await anyio.wait_all_tasks_blocked()
        shim.pipes.close()
    with pytest.raises(errors.ServiceError, match="has ended"):
        await shim.terminal.write(b"x")
    shim.terminal.resize(1, 1)
