"""Starting programs where the manifest grants /usr/bin/cat: the filter lets execve through, so the files must hold.

The agent's own interpreter is not among what must fail: its runtime grants it, the sandbox itself has to start it, and
a second one has the rights of the first.
"""

from __future__ import annotations

import ctypes
import os
import sys

import raw
from elf import program
from harness import probe
from start import in_child, loader, memory_file, run, written

AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
GRANTED = "/usr/bin/cat"
READABLE = "/workspace/agent.toml"
PYTHON = sys.executable or "/usr/bin/python3"


@probe("granted_program")
def granted_program() -> str:
    """The one that must work: without it, every refusal below could be a broken execve."""
    return run(GRANTED, READABLE)


@probe("beside_grant_shell")
def beside_grant_shell() -> str:
    return run("/bin/sh", "-c", "exit 0")


@probe("beside_grant_neighbour")
def beside_grant_neighbour() -> str:
    """A grant of one file in /usr/bin is none of the directory."""
    return run("/usr/bin/env")


@probe("beside_grant_written_file")
def beside_grant_written_file() -> str:
    return run(written("program", program()))


@probe("beside_grant_written_script")
def beside_grant_written_script() -> str:
    """A script needs only its interpreter to be granted, were /tmp not noexec."""
    return run(written("script", f"#!{GRANTED}\n".encode()))


@probe("beside_grant_package_script")
def beside_grant_package_script() -> str:
    """A file of the package with the executable bit, as its author committed it."""
    return run("/workspace/tool")


@probe("beside_grant_loader_written")
def beside_grant_loader_written() -> str:
    """The loader must be there and executable for the granted program; it would start any copy of a program."""
    with open(GRANTED, "rb") as file:
        copy = written("copy", file.read())
    return run(loader(), copy, READABLE)


@probe("beside_grant_loader_interpreter")
def beside_grant_loader_interpreter() -> str:
    return run(loader(), PYTHON, "-c", "")


@probe("beside_grant_library")
def beside_grant_library() -> str:
    """libc.so.6 is also a program."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = [line.split()[-1] for line in file if "/libc.so.6" in line or "/libc-2" in line]
    if not paths:
        raise LookupError("no C library is mapped")
    return run(paths[0])


@probe("beside_grant_memory_file")
def beside_grant_memory_file() -> str:
    return run(memory_file(program()))


@probe("beside_grant_execveat")
def beside_grant_execveat() -> str:
    descriptor = os.open(GRANTED, os.O_RDONLY)
    arguments = (ctypes.c_char_p * 3)(b"cat", READABLE.encode(), None)
    return in_child(lambda: raw.call("execveat", descriptor, b"", arguments, None, AT_EMPTY_PATH))


@probe("beside_grant_execveat_path")
def beside_grant_execveat_path() -> str:
    path = written("at", program()).encode()
    return in_child(lambda: raw.call("execveat", AT_FDCWD, path, None, None, 0))
