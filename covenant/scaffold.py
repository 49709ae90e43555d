"""A new agent package: the smallest of each runtime that checks, signs and runs (``covenant manifest new``).

No file is ever overwritten: the directory is new or empty, and each file is made with O_EXCL below its descriptor. On a
failure the files made so far are removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policy import errors, package
from sandbox.storage import package_reader

RUNTIMES = ("python3", "node", "rust-bin")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ID = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,128}")
_ELF = b"\x7fELF"

_MANIFEST = """\
# What is not written here is not granted. `covenant manifest check` says what is wrong and where, docs/manifest.md
# names every key, and agents/hello has them all written out.

[agent]
id = "{id}"
name = "{id}"
version = "0.1.0"
runtime = "{runtime}"
entry = "{entry}"{entry_note}
role = "observer"                        # reads what it is granted and answers; see policy/data/roles.toml

[resources]
cpu_ms_per_task = 20000                  # milliseconds from the intent to the answer
memory_mb = {memory_mb}
network = "off"                          # the one limit that must be written

[sandbox]
required = true
backend = "linux-gvisor"
filesystem = "read-only-package"         # nothing is writable

# [permissions.filesystem]
# read = ["/usr/share/doc"]              # host paths, seen at the same place
"""

_PYTHON = '''\
"""One JSON line in on stdin, one JSON line out on stdout, everything else to stderr."""

import json
import sys

intent = json.loads(sys.stdin.readline())
answer = {"text": f"You said: {intent['text']}", "sources": []}
sys.stdout.write(json.dumps(answer) + "\\n")
'''

_NODE = """\
// One JSON line in on stdin, one JSON line out on stdout, everything else to stderr.
"use strict";

const fs = require("node:fs");

/** The first line of stdin: characters may lie across two reads, so bytes are joined before they become text. */
function readLine() {
  const chunks = [];
  const chunk = Buffer.alloc(65536);
  for (;;) {
    const count = fs.readSync(0, chunk, 0, chunk.length, null);
    const end = chunk.subarray(0, count).indexOf(0x0a);
    chunks.push(Buffer.from(chunk.subarray(0, end < 0 ? count : end)));
    if (count === 0 || end >= 0) return Buffer.concat(chunks).toString("utf8");
  }
}

const intent = JSON.parse(readLine());
fs.writeSync(1, JSON.stringify({ text: `You said: ${intent.text}`, sources: [] }) + "\\n");
"""

_RUST = """\
// One JSON line in on stdin, one JSON line out on stdout, everything else to stderr.
//
//     rustc -O -C target-feature=+crt-static -o {entry} src/main.rs
//
// Any other ELF program does as well: what counts is the file at `entry` when the package is signed.

use std::io::{{self, BufRead, Write}};

fn main() -> io::Result<()> {{
    let mut intent = String::new();
    io::stdin().lock().read_line(&mut intent)?;
    writeln!(io::stdout(), "{{{{\\"text\\": \\"I was sent {{}} bytes.\\", \\"sources\\": []}}}}", intent.len())
}}
"""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """The files of a new package with their modes, and its agent id."""

    agent_id: str
    files: Mapping[str, tuple[bytes, int]]
    missing_entry: str = ""  # the file that the author must still add
    links: Mapping[str, str] = field(default_factory=dict)


def plan(agent_id: str, runtime: str, *, binary: bytes | None = None) -> Scaffold:
    """Return the files of a new package; ``binary`` is the program of a rust-bin one, if the author has it.

    Raises:
        errors.UsageError: the id is invalid, or a binary is given to another runtime or is no ELF file.
    """
    if not _ID.fullmatch(agent_id):
        hint = "give one with --id: 1 to 128 of A-Z a-z 0-9 _ . -"
        raise errors.UsageError(f"`{agent_id}` cannot be an agent id", hint=hint)
    if binary is not None and runtime != "rust-bin":
        raise errors.UsageError(f"--binary goes with --runtime rust-bin, not `{runtime}`")
    if binary is not None and not binary.startswith(_ELF):
        raise errors.UsageError("the binary is no ELF file", hint="give the program that the compiler made")
    entry = {"python3": "main.py", "node": "main.js"}.get(runtime, f"bin/{agent_id}")
    note = "" if runtime != "rust-bin" else "  # any ELF program; it must lie there before you sign"
    manifest = _MANIFEST.format(
        id=agent_id, runtime=runtime, entry=entry, entry_note=note, memory_mb=512 if runtime == "node" else 128
    )
    files: dict[str, tuple[bytes, int]] = {package.MANIFEST_NAME: (manifest.encode(), 0o644)}
    if runtime != "rust-bin":
        files[entry] = ({"python3": _PYTHON, "node": _NODE}[runtime].encode(), 0o644)
    elif binary is not None:
        files[entry] = (binary, 0o755)
    else:
        files["src/main.rs"] = (_RUST.format(entry=entry).encode(), 0o644)
    return Scaffold(agent_id, files, "" if entry in files else entry)


def read_binary(path: Path) -> bytes:
    """Return the program to copy in, at most as large as a package may be.

    Raises:
        errors.PackageError: it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(package.MAX_BYTES + 1)
    except OSError as e:
        raise errors.PackageError(f"`{path}` cannot be read: {e.strerror}", where=str(path)) from e
    package.check_size(files=1, total_bytes=len(content))
    return content


def write(directory: Path, scaffold: Scaffold) -> None:
    """Make the package's directory, which must be missing or empty, its files and its links.

    Raises:
        errors.PackageError: it is something else, is not empty, or cannot be written; none of our files remain.
    """
    with contextlib.ExitStack() as held, contextlib.ExitStack() as undo:
        try:
            tree = _Tree(_open_new(directory, held, undo), undo)
            for path, (content, mode) in scaffold.files.items():
                tree.write(path, content, mode)
            for path, text in scaffold.links.items():
                tree.link(path, text)
            if scaffold.missing_entry:
                tree.around(scaffold.missing_entry)
        except OSError as e:
            raise errors.PackageError(f"`{directory}` cannot be written: {e.strerror}", where=str(directory)) from e
        undo.pop_all()


def _open_new(directory: Path, held: contextlib.ExitStack, undo: contextlib.ExitStack) -> int:
    """Return a descriptor of the directory, which is created or was empty."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o755)
        undo.callback(_quietly, os.rmdir, directory)
    try:
        fd = os.open(directory, _DIRECTORY)
    except OSError as e:
        raise errors.PackageError(f"`{directory}` is no directory: {e.strerror}", where=str(directory)) from e
    held.callback(os.close, fd)
    if os.listdir(fd):
        hint = "give a new directory: nothing is ever overwritten"
        raise errors.PackageError(f"`{directory}` is not empty", hint=hint, where=str(directory))
    return fd


class _Tree:
    """A directory that is filled. ``undo`` removes what was made.

    No descriptor is kept of a directory below it: a package may have more of them than a process has descriptors.
    """

    def __init__(self, top: int, undo: contextlib.ExitStack) -> None:
        self._top, self._made, self._undo = top, {""}, undo

    def around(self, path: str) -> None:
        """Create the directories of a file that are not made yet."""
        place = os.path.dirname(path)
        if place in self._made:
            return
        self.around(place)
        with self._opened(place) as (parent, name):
            # An existing one was created after the directory was found empty: it belongs to another process, and may
            # be a link.
            os.mkdir(name, 0o755, dir_fd=parent)
        self._undo.callback(self._remove, os.rmdir, place)
        self._made.add(place)

    def write(self, path: str, content: bytes, mode: int) -> None:
        """Write one file."""
        self.around(path)
        # O_EXCL: a file or symlink that another process created meanwhile is not ours.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._opened(path) as (around, name):
            fd = os.open(name, flags, mode, dir_fd=around)
        self._undo.callback(self._remove, os.unlink, path)
        with os.fdopen(fd, "wb") as stream:
            stream.write(content)

    def link(self, path: str, text: str) -> None:
        """Make one symbolic link."""
        self.around(path)
        with self._opened(path) as (around, name):
            os.symlink(text, name, dir_fd=around)
        self._undo.callback(self._remove, os.unlink, path)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the directory of a path, and give its last name. A link or a mount that was put there is refused."""
        place, name = os.path.split(path)
        if not place:
            yield self._top, name
            return
        try:
            fd = package_reader.open_entry(place, place, self._top, _DIRECTORY)
        except errors.PackageError as e:
            raise OSError(errno.ENOTDIR, e.message) from e
        try:
            yield fd, name
        finally:
            os.close(fd)

    def _remove(self, remove: Callable[..., None], path: str) -> None:
        """Remove a created file; a failure must not hide the original error."""
        with contextlib.suppress(OSError), self._opened(path) as (around, name):
            remove(name, dir_fd=around)


def _quietly(remove: Callable[[Path], None], path: Path) -> None:
    """Remove a created directory; a failure must not hide the original error."""
    with contextlib.suppress(OSError):
        remove(path)
