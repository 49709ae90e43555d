"""librarian: answers from the documents that its manifest grants, with the lines it found and where it found them.

It reads its own manifest to learn what it may search, so that a change of the grant is a change of one line. It
needs no network, no program and no write: one pass over the files, in an order that puts those first that people
wrote for people, until the files or the time are used up.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

# The manifest gives cpu_ms_per_task of 20 s to start, search and answer on the slowest machine; people wait less.
SEARCH_SECONDS = 5.0
FILE_BYTES = 256 << 10
UNPACKED_BYTES = 512 << 10
GZIP_MAGIC = b"\x1f\x8b"
MAX_FILES = 50_000
MAX_DEPTH = 8
MAX_WORDS = 8
SOURCES = 8
LINES_PER_SOURCE = 2
LINE_CHARACTERS = 160

# Words of the question, not of the answer. "package" and "file" belong here: every document is of some package.
STOP_WORDS = frozenset("""
a about all an and any are as at be been but by can could did do does document documents every file files find for
from give had has have how i in into is it its list me mention mentioned mentions my named of on or our package
packages please say says search show so some such tell that the their them there these they this to was we were
what when where which who whom whose why will with would you your
""".split())

# What people read first is read first: the order matters when the time runs out.
ORDER = (("readme", "news", "faq", "todo", "overview", "intro"), ("copyright",), ("changelog",))

_SKIPPED = (
    ".png", ".jpg", ".jpeg", ".gif", ".svg", ".svgz", ".ico", ".pdf", ".ps", ".eps", ".dvi", ".woff", ".woff2", ".ttf",
    ".zip", ".tar", ".tgz", ".xz", ".bz2", ".zst", ".js", ".css", ".map", ".inv", ".so", ".o", ".a", ".bin", ".dat",
)
SKIPPED_ENDINGS = _SKIPPED + tuple(ending + ".gz" for ending in _SKIPPED)


@dataclass(frozen=True)
class Find:
    """One file that has at least one of the words. Packages built from one source often share a text: `fingerprint`."""

    path: str
    score: float
    fingerprint: int


def words_of(question: str) -> list[str]:
    """The words worth looking for, in the order of the question, plurals cut."""
    found: list[str] = []
    for word in re.findall(r"[^\W_][\w.+-]*", question.lower())[:200]:
        word = word.strip(".+-") or word
        if word in STOP_WORDS or len(word) < 2:
            continue
        if len(word) > 4 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
            word = word[:-1]
        if word not in found:
            found.append(word)
    return found[:MAX_WORDS]


def files_below(root: str) -> Iterator[str]:
    """Regular files, never through a symlink, breadth first so that no deep tree eats the time."""
    level = [root]
    for _ in range(MAX_DEPTH):
        below: list[str] = []
        for directory in level:
            try:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        # A name that is no text, or that steers a terminal, could not be given as a source.
                        if not entry.name.isprintable():
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            below.append(entry.path)
                        elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(SKIPPED_ENDINGS):
                            yield entry.path
            except OSError:
                continue
        level = below


def place(path: str) -> tuple[int, int, str]:
    """Where a file stands in the order of reading: its kind, its depth, its name."""
    name = os.path.basename(path).lower()
    for rank, kinds in enumerate(ORDER):
        if name.startswith(kinds):
            return (rank, path.count("/"), path)
    return (len(ORDER), path.count("/"), path)


def read(path: str) -> bytes:
    """The beginning of a file, unpacked if it is gzip; nothing for what cannot be read."""
    try:
        # NONBLOCK: a fifo that came in between must not hold us; NOFOLLOW: nor a symlink lead us out.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        raw = os.read(descriptor, FILE_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
    return unpack(raw) if raw.startswith(GZIP_MAGIC) else raw


def unpack(packed: bytes) -> bytes:
    """Decompress a gzip stream up to UNPACKED_BYTES: a small file may unpack to more than the memory.

    Use zlib and not the gzip module. The module refuses a stream cut at FILE_BYTES, and needs four calls to read bytes
    that are already in memory.
    """
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(packed, UNPACKED_BYTES)
    except zlib.error:
        return b""


def lines_with(content: bytes, words: list[str]) -> list[tuple[int, str]]:
    """Return the lines with the most of the words as (number, printable text), in the order of the file."""
    lines = content.decode("utf-8", "replace").splitlines()
    # The most words first, then the earliest line.
    ranked = [(-hits, number) for number, line in enumerate(lines, 1)
              if (hits := sum(word in line.lower() for word in words))]
    return [(number, shown(lines[number - 1], words)) for _, number in sorted(sorted(ranked)[:LINES_PER_SOURCE],
                                                                              key=lambda pair: pair[1])]


def shown(line: str, words: list[str]) -> str:
    """A line on one line, cut around the first word, without characters that steer a terminal."""
    line = " ".join("".join(char if char.isprintable() else " " for char in line).split())
    if len(line) <= LINE_CHARACTERS:
        return line
    first = min((at for at in (line.lower().find(word) for word in words) if at >= 0), default=0)
    start = max(0, min(first - LINE_CHARACTERS // 3, len(line) - LINE_CHARACTERS))
    end = start + LINE_CHARACTERS
    return ("..." if start else "") + line[start:end] + ("..." if end < len(line) else "")


def score(path: str, content: bytes, words: list[str]) -> float:
    """How well a file answers: each word counts, rare repetition little, a name that says it much."""
    folded = content.lower()
    total, name = 0.0, path.lower()
    for word in words:
        needle = word.encode()
        count = folded.count(needle)
        if count:
            whole = re.search(rb"\b" + re.escape(needle) + rb"\b", folded) is not None
            total += 10 + min(10.0, 2 * math.log2(1 + count)) + (4 if whole else 0)
            total += 15 if word in name else 0
    # A changelog mentions everything once; what describes the package is the better answer.
    return total * (0.7 if place(path)[0] == 2 else 1.0)


def search(roots: list[str], words: list[str]) -> tuple[list[Find], int, bool]:
    """The finds, best first, how many files were read, and whether that was all of them."""
    deadline = time.monotonic() + SEARCH_SECONDS
    paths = sorted((path for root in roots for path in files_below(root)), key=place)[:MAX_FILES]
    needles = [word.encode() for word in words]
    finds: list[Find] = []
    read_files = 0
    for path in paths:
        if time.monotonic() > deadline:
            break
        content = read(path)
        read_files += 1
        folded = content.lower()
        if any(needle in folded for needle in needles):
            finds.append(Find(path, score(path, content, words), zlib.crc32(content)))
    # Of equals the shorter name: `file` before `file-dev`.
    finds.sort(key=lambda find: (-find.score, len(find.path), find.path))
    return finds, read_files, read_files == len(paths)


def different(finds: list[Find]) -> list[Find]:
    """The finds without those that say the same as one before."""
    first: dict[int, Find] = {}
    for find in finds:
        first.setdefault(find.fingerprint, find)
    return list(first.values())


def package_of(path: str, roots: list[str]) -> str:
    """The first name below the root that holds the path: below /usr/share/doc, the package."""
    for root in roots:
        if path.startswith(root.rstrip("/") + "/"):
            return path[len(root.rstrip("/")) + 1:].split("/", 1)[0]
    return path


def several(names: list[str], limit: int = 8) -> str:
    """A list that a person reads to its end."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def answer(question: str, roots: list[str]) -> dict[str, object]:
    """The whole answer to one intent."""
    words = words_of(question)
    if not words:
        return {"text": "Name what I should look for, for example: which package mentions seccomp", "sources": []}
    finds, read_files, complete = search(roots, words)
    where = " and ".join(roots)
    extent = f"{read_files:,} files of {where}" + ("" if complete else " (the time was up before the rest)")
    quoted = " ".join(f'"{word}"' for word in words)
    if not finds:
        return {"text": f"Nothing mentions {quoted} in {extent}.", "sources": []}
    # The best file of each package: six files of one package say less than one file of six.
    by_package: dict[str, Find] = {}
    for find in finds:
        by_package.setdefault(package_of(find.path, roots), find)
    packages = list(by_package)
    what = "it" if len(words) == 1 else "at least one of them"
    text = [f"{quoted}: {len(finds):,} of {extent} mention {what}; packages: {several(packages)}."]
    best = different(list(by_package.values()))[:SOURCES]
    for find in best:
        text.append(find.path)
        text += [f"  {number}: {line}" for number, line in lines_with(read(find.path), words)]
    return {"text": "\n".join(text), "sources": [find.path for find in best]}


def granted_roots() -> list[str]:
    """The directories that this agent's own manifest lets it read."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent.toml"), "rb") as file:
        manifest = tomllib.load(file)
    return list(manifest["permissions"]["filesystem"]["read"])


def main() -> None:
    """One JSON line in, one JSON line out."""
    intent = json.loads(sys.stdin.readline())
    sys.stdout.write(json.dumps(answer(intent["text"], granted_roots())) + "\n")


if __name__ == "__main__":
    main()
