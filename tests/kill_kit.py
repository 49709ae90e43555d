"""A process that says what it was promised, one word and one name a line, and is killed in the middle of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path


def promised(command: Sequence[str], lines: int) -> dict[str, set[str]]:
    """The names under each word, of a command that is killed after so many lines."""
    said: dict[str, set[str]] = defaultdict(set)

    def heard(line: str) -> None:
        word, name = line.split()
        said[word].add(name)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as writer:
        assert writer.stdout is not None
        for _ in range(lines):
            heard(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        # The last line may be in part.
        for line in writer.stdout.read().split("\n")[:-1]:
            heard(line)
    return said
