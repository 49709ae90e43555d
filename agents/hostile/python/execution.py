"""Starting programs with no executables grant: nothing but the agent's own interpreter may ever run."""

from __future__ import annotations

import os
import sys

import raw
from elf import program
from harness import Blocked, probe
from start import in_child, loader, memory_file, run, written

AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
PYTHON = sys.executable or "/usr/bin/python3"


@probe("exec_interpreter")
def exec_interpreter() -> str:
    """A fresh interpreter, the one program whose file is certainly there."""
    return run(PYTHON, "-c", "")


@probe("exec_shell")
def exec_shell() -> str:
    return run("/bin/sh", "-c", "exit 0")


@probe("exec_other_interpreter")
def exec_other_interpreter() -> str:
    return run("/usr/bin/perl", "-e", "exit 0")


@probe("exec_written_file")
def exec_written_file() -> str:
    return run(written("program", program()))


@probe("exec_written_script")
def exec_written_script() -> str:
    return run(written("script", b"#!/usr/bin/python3\n"))


@probe("exec_loader")
def exec_loader() -> str:
    """The loader maps and starts any file that it can read, noexec or not."""
    return run(loader(), PYTHON, "-c", "")


@probe("exec_memory_file")
def exec_memory_file() -> str:
    return run(memory_file(program()))


@probe("exec_memory_file_at")
def exec_memory_file_at() -> str:
    descriptor = memory_file(program())
    return in_child(lambda: raw.call("execveat", descriptor, b"", None, None, AT_EMPTY_PATH))


@probe("exec_at")
def exec_at() -> str:
    """The same act by another number: a filter that knows only execve leaves it open."""
    path = written("at", program()).encode()
    return in_child(lambda: raw.call("execveat", AT_FDCWD, path, None, None, 0))


@probe("exec_self")
def exec_self() -> str:
    return run("/proc/self/exe", "-c", "")


@probe("exec_spawn")
def exec_spawn() -> str:
    """posix_spawn goes through vfork: a wall that stands in fork alone would miss it."""
    child = os.posix_spawn(PYTHON, [PYTHON, "-c", ""], {})
    _, status = os.waitpid(child, 0)
    if status:
        raise Blocked(f"ended with status {status}")
    return "spawned an interpreter"
