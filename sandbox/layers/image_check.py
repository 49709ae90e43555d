"""Check that a root image is what was made: by the table of its inodes, and by its bytes where the table differs.

A hard link that another image makes or removes changes the time of an inode too. So a line that differs is no proof of
a change: the file is then read and compared with the image's listing. Equal bytes give the image its new table.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from policy import errors, layers
from sandbox.kernel.proc import spawn
from sandbox.kernel.proc.launch import Launch
from sandbox.layers import store, tree_table
from sandbox.rootfs import tree_store
from sandbox.storage import atomic_file

# A small tree is walked here: a process takes 20 ms to begin.
FEW_FILES = 3000
_SECONDS = 60.0
_CHUNK_BYTES = 1 << 18
FIX = (
    "covenant layer verify names the layer, if its files were changed; "
    "`covenant layer gc --images` removes the image, and the next run makes it again"
)


class ImageCheck:
    """The check of one image. It may be begun at the start of a run, and is awaited before the agent's code runs."""

    def __init__(self, folder: Path, child: spawn.Child | None, found: int) -> None:
        self._folder, self._child, self._found = folder, child, found
        self._done = False

    def wait(self) -> None:
        """Wait for the result. A second call returns at once.

        Raises:
            errors.LayerChangedError: Raised when a file of the image is not as it was made.
        """
        if not self._done:
            self._compare()
            self._done = True

    def _compare(self) -> None:
        root, recorded = self._folder / "root", self._folder / "table"
        if self._child is None:
            now = tree_table.table(str(root))
            if now == self._record("table"):
                return
        else:
            self._finish(self._child)
            if self._same_table():
                return
            now = os.pread(self._found, os.fstat(self._found).st_size, 0)
        self._read_again(root, tree_table.changed(self._record("table"), now))
        atomic_file.derive(recorded, now)

    def _record(self, name: str) -> bytes:
        return tree_store.record(self._folder, name, hint=FIX)

    def _finish(self, child: spawn.Child) -> None:
        until = time.monotonic() + _SECONDS
        if not spawn.Patience().readable(child.pidfd, until=until) or child.reap() != 0:
            raise errors.LayerChangedError(
                f"the root image `{self._folder}` cannot be read", hint=FIX, where=str(self._folder)
            )

    def _same_table(self) -> bool:
        """Compare the two tables piece by piece: whole, they would count in the memory of every run."""
        with tree_store.opened_record(self._folder, "table", hint=FIX) as fd:
            size = os.fstat(fd).st_size
            return os.fstat(self._found).st_size == size and all(
                os.pread(fd, _CHUNK_BYTES, at) == os.pread(self._found, _CHUNK_BYTES, at)
                for at in range(0, size, _CHUNK_BYTES)
            )

    def _read_again(self, root: Path, paths: list[str]) -> None:
        entries = {e.path: e for e in layers.parsed(self._record("listing"))}
        wrong = store.differences(root, tuple(entries.values()), only=frozenset(paths))
        if wrong:
            raise errors.LayerChangedError(
                f"a root image was changed: {wrong[0]}",
                hint=FIX,
                where=str(root),
                differences=list(wrong),
            )


@contextlib.contextmanager
def begin(folder: Path, files: int) -> Iterator[ImageCheck]:
    """Begin the check of the image in ``folder``, which has so many files. The block's end stops it.

    Raises:
        errors.KernelError: Raised when the process that walks a large tree cannot be started.
    """
    if files <= FEW_FILES:
        yield ImageCheck(folder, None, -1)
        return
    found = os.memfd_create("covenant-table", os.MFD_CLOEXEC)
    try:
        launch = Launch(
            program=sys.executable,
            arguments=[
                *(sys.executable, "-I", "-S", "-B", str(Path(tree_table.__file__))),
                *(str(folder / "root"), str(found)),
            ],
            environment={"LC_ALL": "C.UTF-8"},
            keep=(found,),
        )
        with spawn.spawn(launch) as child:
            yield ImageCheck(folder, child, found)
    finally:
        os.close(found)
