"""Errors of packages that a process could not read: an answer of the daemon can carry them, with any name."""

from __future__ import annotations

import os
from pathlib import Path

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
