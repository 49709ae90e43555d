"""An append-only file of lines: a line is on disk when its ``append`` returns.

Concurrent appends share a sync (``covenant.stores.group_commit``). A line that a crash left without its newline was
never acknowledged; the next opening moves it to a separate file and reports it. When the disk is full the line is
refused and the file is unchanged. After a failed sync the state of the disk is unknown, and the journal takes no more
lines.

Only one process writes a journal: the daemon holds a lock on its home.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio.to_thread

from covenant import homes
from covenant.stores import group_commit
from policy import errors
from sandbox.storage import atomic_file

MAX_LINE_BYTES = 16 * 1024 * 1024

_CHUNK_BYTES = 1 << 20
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Select = Callable[[list[bytes]], Iterable[bytes]]
Change = Callable[[Iterable[bytes]], Iterable[bytes]]
# Gets the descriptor and the size of the file. It does not raise after the opening.
Follow = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Append:
    data: bytes


@dataclass(frozen=True, slots=True)
class _Rewrite:
    change: Change


class Journal:
    """An open journal. Make it with ``Journal.open``; close it, or use it as an async context manager.

    ``recovered`` lists the data that the opening set aside.
    """

    def __init__(self, path: Path, mode: int, follow: Follow | None = None) -> None:
        self.recovered: list[str] = []
        self._follow = follow or _ignore
        self._path = path
        self._mode = mode
        self._directory = self._fd = -1
        self._size = 0
        self._turns: group_commit.GroupCommit[_Append | _Rewrite, None] = group_commit.GroupCommit(
            self._write, what=str(path)
        )

    @classmethod
    async def open(cls, path: Path, mode: int = 0o600, *, follow: Follow | None = None) -> Self:
        """Open or create the journal at ``path``. A missing directory is created with mode 0700 in an existing parent.

        ``follow`` is called in the writing thread at the opening, and after each durable write before its writers
        resume.

        Raises:
            errors.StoreError: the file or its directory is a symlink, not ours alone, or cannot be used.
        """
        journal = cls(path, mode, follow)
        await anyio.to_thread.run_sync(journal._open)
        return journal

    async def append(self, line: bytes) -> None:
        """Write one line, given without its newline; it is durable when this returns.

        After a cancellation the line may be present or not; other lines are not affected.

        Raises:
            errors.StoreFullError: there is no room; no part of the line is present, and later appends are tried again.
            errors.StoreError: it is not one line, or the disk failed. After the latter every append is refused.
        """
        await self.append_all([line])

    async def append_all(self, lines: Sequence[bytes]) -> None:
        """Append several lines in one write; after a crash the file may hold only the first few.

        Raises:
            errors.StoreError: as ``append``; for all of them.
        """
        for line in lines:
            self._check(line)
        if lines:
            await self._turns.submit(_Append(b"".join(line + b"\n" for line in lines)))

    async def rewrite(self, lines: Iterable[bytes] | Select) -> None:
        """Replace all lines by others, completely or not at all.

        ``lines`` may be a function from the present lines to the new ones. It runs in a worker thread between two
        writes, so that its argument includes lines appended meanwhile.

        Raises:
            errors.StoreError: as ``append``; the old lines are kept.
        """
        await self.change(lambda there: lines(list(there)) if callable(lines) else lines)

    async def change(self, change: Change) -> None:
        """Replace all lines, as ``rewrite`` does, without holding them: ``change`` yields the new ones as it reads.

        Its argument can be read more than once.

        Raises:
            errors.StoreError: as ``append``; the old lines are kept.
        """
        await self._turns.submit(_Rewrite(change))

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines, without their newlines, up to the last that was durable when this began."""
        chunks = lines_by_chunk(self._fd, 0, self._size, where=self._path)
        while (whole := await anyio.to_thread.run_sync(next, chunks, None)) is not None:
            for line in whole:
                yield line

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.lines()

    async def replay(self, take: Callable[[bytes, str], object]) -> None:
        """Call ``take`` with each line and its place. If it raises, close the file and re-raise."""
        number = 0
        try:
            async for line in self.lines():
                number += 1
                take(line, f"{self._path}:{number}")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """The acknowledged size of the file."""
        return self._size

    async def close(self) -> None:
        """Write the queued lines, refuse later ones, and close the file."""
        await self._turns.close("it was closed")
        for fd in (self._fd, self._directory):
            if fd >= 0:
                os.close(fd)
        self._fd = self._directory = -1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- opening ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                self._directory = self._open_directory()
                stack.callback(os.close, self._directory)
                self._fd = os.open(self._path.name, _FLAGS, self._mode, dir_fd=self._directory)
                stack.callback(os.close, self._fd)
                self._check_private()
                os.fsync(self._directory)
                self._set_torn_tail_aside()
                self._follow(self._fd, self._size)
                stack.pop_all()
        except OSError as e:
            reason = "it is a symlink" if e.errno == errno.ELOOP else e.strerror
            raise errors.StoreError(f"`{self._path}` cannot be used: {reason}", where=str(self._path)) from e

    def _open_directory(self) -> int:
        parent, name = self._path.parent.parent, self._path.parent.name
        if self._path.parent.exists():
            return atomic_file.open_directory(self._path.parent, error=errors.StoreError)
        above = atomic_file.open_directory(parent, error=errors.StoreError)
        try:
            return atomic_file.open_subdirectory(above, name, where=str(parent), make=True, error=errors.StoreError)
        finally:
            os.close(above)

    def _check_private(self) -> None:
        info = os.fstat(self._fd)
        # A second link would be another name of the same bytes outside our directory.
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise errors.StoreError(f"`{self._path}` is no plain file with one name", where=str(self._path))
        if info.st_uid != os.geteuid() or info.st_mode & 0o077 & ~self._mode:
            raise errors.StoreError(
                f"`{self._path}` is not ours alone",
                hint=homes.close_hint(self._path, f"{self._mode:04o}"),
                where=str(self._path),
            )

    def _set_torn_tail_aside(self) -> None:
        size = os.fstat(self._fd).st_size
        end = _end_of_last_line(self._fd, size)
        if end < size:
            tail = os.pread(self._fd, size - end, end)
            aside = self._free_name()
            atomic_file.create(self._directory, aside, tail)
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)
            self.recovered.append(
                f"{size - end} bytes of `{self._path.name}` that were never acknowledged: see `{aside}`"
            )
        self._size = end

    def _free_name(self) -> str:
        taken = set(os.listdir(self._directory))
        return next(name for n in range(1, len(taken) + 2) if (name := f"{self._path.name}.torn-{n}") not in taken)

    # --- writing, in the worker thread ------------------------------------------------------------------

    def _write(self, items: Sequence[_Append | _Rewrite]) -> list[Exception | None]:
        answers: list[Exception | None] = []
        together: list[bytes] = []
        for item in items:
            if isinstance(item, _Append):
                together.append(item.data)
                continue
            answers += self._write_lines(together)
            together = []
            answers.append(self._replace(item.change))
        return answers + self._write_lines(together)

    def _write_lines(self, lines: Sequence[bytes]) -> list[Exception | None]:
        if not lines:
            return []
        self._check_name()
        data = b"".join(lines)
        try:
            _write_all(self._fd, data)
        except OSError as e:
            if e.errno not in _FULL:
                raise
            # The partial lines are useless to a reader, and none of them was acknowledged.
            os.ftruncate(self._fd, self._size)
            return [self._full(e) for _ in lines]
        os.fdatasync(self._fd)
        self._size += len(data)
        self._follow(self._fd, self._size)
        return [None] * len(lines)

    def _replace(self, change: Change) -> Exception | None:
        self._check_name()
        name = self._path.name
        failed: Exception | None = None

        def checked() -> Iterator[bytes]:
            nonlocal failed
            try:
                for line in change(_Lines(self._fd, self._size, self._path)):
                    self._check(line)
                    yield line
            except Exception as e:
                failed = e
                raise

        try:
            atomic_file.replace(self._directory, name, joined(checked()), mode=self._mode)
        except Exception as e:
            if failed is not None:  # an error of the caller's function goes to the caller
                return failed
            if not isinstance(e, OSError) or e.errno not in _FULL:
                raise
            return self._full(e)
        fd = os.open(name, _FLAGS, dir_fd=self._directory)
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)
        self._size = os.fstat(self._fd).st_size
        self._follow(self._fd, self._size)
        return None

    def _check_name(self) -> None:
        """Check that the open file is still the one under its name: a line in an unlinked file is lost."""
        ours = os.fstat(self._fd)
        try:
            named = os.stat(self._path.name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            named = None
        if named is None or (ours.st_dev, ours.st_ino) != (named.st_dev, named.st_ino):
            raise errors.StoreError("it was removed or replaced while it was open", where=str(self._path))
        if ours.st_size != self._size:
            raise errors.StoreError("somebody else wrote to it", where=str(self._path))

    def _check(self, line: bytes) -> None:
        if b"\n" in line or not line or len(line) > MAX_LINE_BYTES:
            raise errors.StoreError(
                f"what should be written is not one line of at most {MAX_LINE_BYTES} bytes", where=str(self._path)
            )

    def _full(self, error: OSError) -> errors.StoreFullError:
        return errors.StoreFullError(
            f"`{self._path.name}` could not take what should be kept: {error.strerror}",
            hint="make room on the disk and repeat",
            where=str(self._path),
        )


class _Lines:
    """The lines of an open file, without their newlines, read in chunks each time."""

    def __init__(self, fd: int, size: int, where: Path) -> None:
        self._fd, self._size, self._where = fd, size, where

    def __iter__(self) -> Iterator[bytes]:
        for whole in lines_by_chunk(self._fd, 0, self._size, where=self._where):
            yield from whole


def lines_by_chunk(fd: int, start: int, end: int, *, where: Path) -> Iterator[list[bytes]]:
    """Read the lines of a file from one offset to another, and yield those that each chunk completes.

    Raises:
        errors.StoreError: the file is shorter.
    """
    position, rest = start, b""
    while position < end:
        chunk = os.pread(fd, min(_CHUNK_BYTES, end - position), position)
        if not chunk:
            raise errors.StoreError("the file became shorter while it was read", where=str(where))
        position += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        yield whole


def joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines with their newlines, many at a time."""
    held: list[bytes] = []
    held_bytes = 0
    for line in lines:
        held += (line, b"\n")
        held_bytes += len(line) + 1
        if held_bytes >= _CHUNK_BYTES:
            yield b"".join(held)
            held, held_bytes = [], 0
    yield b"".join(held)


def _ignore(fd: int, size: int) -> None:
    """Follow nothing."""


def _end_of_last_line(fd: int, size: int) -> int:
    end = size
    while end:
        start = max(0, end - _CHUNK_BYTES)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
