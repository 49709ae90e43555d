"""A package takes a link exactly where the kernel finds its end beneath the package, and finds the same place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from policy import errors, symlinks
from sandbox.kernel import libc

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
TEXTS = st.tuples(st.integers(0, 3), st.lists(NAMES, max_size=3)).map(
    lambda made: "/".join([*[".."] * made[0], *made[1]])
)


@given(st.lists(st.tuples(PATHS, st.none() | TEXTS), min_size=1, max_size=9))
def test_kernel_finds_what_check_says(entries: list[tuple[str, str | None]]) -> None:
    made: dict[str, str | None] = {"agent.toml": None}
    for path, text in entries:
        taken = any(path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in made)
        if not taken and text != "":
            made[path] = text
    contents = [path for path, text in made.items() if text is None]
    links = {path: text for path, text in made.items() if text is not None}
    reason = ""
    try:
        symlinks.check_package(links, contents)
    except errors.PackageError as e:
        reason = e.message
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder).resolve()
        for path, text in made.items():
            (top / path).parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                (top / path).write_bytes(b"")
            else:
                (top / path).symlink_to(text)
        root = os.open(top, os.O_PATH | os.O_DIRECTORY)
        try:
            found = {path: _beneath(root, str(top), path) for path in links}
        finally:
            os.close(root)
    if not reason:
        assert found == {path: symlinks.follow_in_package(path, links) for path in links}
    elif "is a loop" in reason:  # the kernel follows a link to a directory around it
        assert any(place == "" or path.startswith(f"{place}/") for path, place in found.items() if place is not None)
    else:
        assert None in found.values(), reason


def _beneath(root: int, top: str, path: str) -> str | None:
    try:
        fd = libc.openat2(path, os.O_PATH, dir_fd=root, resolve=libc.RESOLVE_BENEATH)
    except OSError:
        return None
    try:
        return os.readlink(f"/proc/self/fd/{fd}").removeprefix(top).lstrip("/")
    finally:
        os.close(fd)
