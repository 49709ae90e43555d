"""Granted executables end to end: the granted program starts from a signed package, and no other way of starting one.

Every refusal stands beside the granted program in the same run, which shows that execve itself is allowed there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kernel.world import World

GRANT = {"more": '[permissions.executables]\nallow = ["/usr/bin/sort"]\n'}
LOADER = "/lib64/ld-linux-x86-64.so.2"

# `start` forks and executes: the program's output and status, or the name of the error of execv.
START = r"""
import ctypes, errno, os, shutil, stat
def start(*argv, through=os.execv):
    r, w = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(w, 1)
        try:
            through(argv[0], argv)
        except OSError as e:
            os.write(1, errno.errorcode[e.errno].encode())
            os._exit(99)
    os.close(w)
    said = b""
    while chunk := os.read(r, 65536):
        said += chunk
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode(errors="replace")[:200]]
open("/tmp/lines", "w").write("b\na\n")
control = start("/usr/bin/sort", "/tmp/lines")
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def _ask(world: World, code: str, **fields: Any) -> Any:
    return world.ask(START + code, **{**GRANT, **fields})


def test_granted_program_starts(world: World) -> None:
    assert _ask(world, "answer = control") == [0, "a\nb\n"]


def test_without_grant_it_does_not_exist_and_nothing_starts(world: World) -> None:
    code = "answer = [control, start('/usr/bin/python3'), os.path.exists('/usr/bin/sort')]"
    assert _ask(world, code, more="") == [[99, "EPERM"], [99, "EPERM"], False]


WAYS = {
    "a written file": ("shutil.copy('/usr/bin/sort', '/tmp/s'); os.chmod('/tmp/s', 0o755)", ["/tmp/s"]),
    "a file of the package": ("", ["/workspace/main.py"]),
    "the loader with a written file": ("shutil.copy('/usr/bin/sort', '/tmp/s')", [LOADER, "/tmp/s", "/tmp/lines"]),
    "the loader with the granted program": ("", [LOADER, "/usr/bin/sort", "/tmp/lines"]),
    "the C library": ("", ["/usr/lib/x86_64-linux-gnu/libc.so.6"]),
    "a shell": ("", ["/bin/sh", "-c", "echo hi"]),
    "a module of the standard library": ("", ["/usr/lib/python3/os.py"]),
}
EXPECTED = {
    "a written file": [99, "EACCES"],
    "a file of the package": [99, "EACCES"],
    "the loader with a written file": [126, ""],
    "the loader with the granted program": [126, ""],
    "the C library": [99, "EACCES"],
    "a shell": [99, "ENOENT"],
    "a module of the standard library": [99, "ENOENT"],
}


def test_nothing_else_starts(world: World) -> None:
    code = "answer = {'control': control}\n"
    for name, (before, argv) in WAYS.items():
        code += f"{before}\nanswer[{name!r}] = start(*{argv!r})\n"
    assert _ask(world, code) == {"control": [0, "a\nb\n"], **EXPECTED}


def test_memory_is_no_way_either(world: World) -> None:
    code = """
def descriptor(path, argv):
    os.execve(os.open(path, os.O_RDONLY), argv, {})
try:
    fd = os.memfd_create("x")
    answer = "made"
except OSError as e:
    answer = errno.errorcode[e.errno]
answer = [control, answer, start("/usr/bin/sort", "/tmp/lines", through=descriptor)]
"""
    control, memory, descriptor = _ask(world, code)
    assert control == [0, "a\nb\n"]
    assert memory == "EPERM"
    assert descriptor[0] == 99, "execveat is denied: fexecve of the granted program itself"


def test_digest_in_manifest_is_held(world: World) -> None:
    import hashlib

    from policy import errors

    digest = hashlib.sha256(Path("/usr/bin/sort").read_bytes()).hexdigest()
    pinned = '[permissions.executables]\nallow = ["/usr/bin/sort@sha256:{}"]\n'
    assert _ask(world, "answer = control", more=pinned.format(digest)) == [0, "a\nb\n"]
    other = world.sign(world.package({"main.py": START}, more=pinned.format(digest[::-1])))
    with pytest.raises(errors.ProgramError, match="the manifest wants"):
        world.run(other)
