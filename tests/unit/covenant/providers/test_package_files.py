"""Packages that a process reads: errors that an answer of the daemon can carry, and readers that are given up."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from covenant.providers import package_files
from covenant.wire import parts, responses
from policy import errors

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("name", [b"bytes-\xff", b"two\nlines", b"\x1b[2Jclear"])
async def test_error_of_package_with_any_name_can_be_answered(tmp_path: Path, name: bytes) -> None:
    place = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    place.touch()
    with pytest.raises(errors.PackageError, match="Not a directory") as refused:
        async with package_files.opened(place, {}, seconds=60):
            pass
    listed = parts.AgentListing(directory="x", routable=False, error=str(refused.value))
    assert b"Not a directory" in responses.AgentDirectory(agents=(listed,)).to_bytes()
    assert str(refused.value).isprintable()


async def test_reader_that_was_given_up_is_reaped(tmp_path: Path) -> None:
    for _ in range(5):
        # Its interpreter is not even started by then.
        with pytest.raises(errors.HangingError):
            async with package_files.opened(tmp_path, {}, seconds=0):
                pass
        async with package_files.opened(tmp_path, {}, seconds=60) as (directory, _):
            assert os.path.samestat(os.fstat(directory), tmp_path.stat())


async def test_reader_of_a_cancelled_request_is_reaped(tmp_path: Path) -> None:
    for _ in range(5):
        with anyio.move_on_after(0) as scope:
            async with package_files.opened(tmp_path, {}, seconds=60):
                pass
        assert scope.cancelled_caught
        async with package_files.opened(tmp_path, {}, seconds=60) as (directory, _):
            assert os.path.samestat(os.fstat(directory), tmp_path.stat())
