"""Descriptors that a request brings, of a file whose file system hangs at close(2) (FUSE_FLUSH, ADR 0061)."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import unix_wire
from tests.kernel import hanging_files, serving
from tests.kernel.hanging_files import Hanging
from tests.kernel.serving import CALLER, Served
from tests.kernel.world import World

SECONDS, ENDED_SECONDS = 2, 15


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with (
        serving.open_place() as base,
        Served(World(base, warm=warm), callers=[CALLER], caller_requests=4, request_seconds=SECONDS) as made,
    ):
        yield made


@contextlib.contextmanager
def asked(served: Served, files: Hanging, descriptors: int) -> Iterator[str]:
    """Yield the answer to a request that brings so many descriptors of a file whose FLUSH hangs."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "nothing"
        try:
            os.setgroups([])
            os.setgid(CALLER)
            os.setuid(CALLER)
            fd = os.open(files.place / "main.py", os.O_RDONLY)
            frame = unix_wire.encode({"kind": "ps"})
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(served.path))
                rights = array.array("i", [fd] * descriptors)
                sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                until = time.monotonic() + ENDED_SECONDS
                said = json.loads(unix_wire.receive(sock, max_bytes=1 << 20, until=until) or b"null")["code"]
        except BaseException as e:
            said = f"no answer: {e}"
        finally:
            os.write(write, said.encode())
            os.close(write)
            os._exit(0)  # which waits for FUSE as well
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    try:
        yield said
    finally:
        files.answer()
        os.waitpid(pid, 0)


@pytest.mark.parametrize("descriptors", [1, 3], ids=["control: one", "three"])
def test_descriptors_of_hanging_file_system_are_answered_and_named(served: Served, descriptors: int) -> None:
    source = served.world.sign(served.world.copy("hello"))
    with hanging_files.mounted(source, served.world.base / "hangs", uid=CALLER) as files:
        files.hang("FLUSH")
        with asked(served, files, descriptors) as said:
            until = time.monotonic() + ENDED_SECONDS
            while "survives SIGKILL" not in served.log() and time.monotonic() < until:
                time.sleep(0.1)
            named = "survives SIGKILL" in served.log()
            begin = time.monotonic()
            assert served.stop() == 0
            stop_seconds = time.monotonic() - begin
    found = {"answered": said in {"bad_request", "file_system_hangs"}, "named": named, "soon": stop_seconds < 15}
    assert found == {"answered": True, "named": True, "soon": True}, (said, stop_seconds, served.log())
