"""The init of a run: its bytes are those of its source, and its file is what a kernel takes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from policy import data
from policy.compile import init
from policy.decompile import config
from sandbox.rootfs import elf, init_program
from sandbox.rootfs.skeleton import Skeletons

SOURCE = Path(init_program.__file__).with_name("init.S")


def test_init_bytes_are_those_of_source(tmp_path: Path) -> None:
    subprocess.run(["as", "-o", tmp_path / "init.o", SOURCE], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", tmp_path / "init.o", tmp_path / "text"], check=True)
    assert (tmp_path / "text").read_bytes() == init_program.CODE


def test_init_is_static_program_without_needs() -> None:
    raw = init_program.build()
    found = elf.parse(raw, name="init")
    assert (found.arch, found.interpreter, found.needed, found.dynamic) == ("x86_64", "", (), False)
    assert len(raw) < 1024
    # One segment, and nothing in it can be written.
    assert [segment.flags for segment in found.segments if segment.kind == elf.PT_LOAD] == [5]


def test_init_calls_are_those_it_declares() -> None:
    """Every number that the source moves into eax before a system call, with the name in its comment."""
    numbers = data.syscalls("x86_64").numbers
    lines = SOURCE.read_text().splitlines()
    loads = [line.split("%eax", 1) for at, line in enumerate(lines) if lines[at + 1 : at + 2] == ["\tsyscall"]]
    found = {tail.strip(" \t/*").split()[0].rstrip(",:") for _, tail in loads}
    assert {numbers[name] for name in found} == {int(head.split("$")[1].split(",")[0]) for head, _ in loads}
    # The last two serve a terminal alone, and are asked for with its ioctls.
    assert found - {"setpgid", "getpid"} == init.CALLS == config.INIT_CALLS


def test_init_stands_executable_in_root(tmp_path: Path) -> None:
    (tmp_path / "rootfs").mkdir(mode=0o700)
    root = Skeletons(tmp_path / "rootfs").get([init_program.closure(tmp_path / "closures")], [("/proc", "dir")])
    placed = Path(f"{root}{init.PROGRAM}")
    assert placed.read_bytes() == init_program.build()
    assert stat.S_IMODE(placed.stat().st_mode) == 0o755
    assert [path.name for path in placed.parent.iterdir()] == ["init"]


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "init"
    path.write_bytes(init_program.build())
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)])
def test_init_exits_with_status_of_its_child(program: str, script: str, status: int) -> None:
    assert subprocess.run([program, "/bin/sh", "-c", script], check=False).returncode == status


def test_init_says_why_nothing_was_started(program: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"no program")
    started = [[program], [program, str(plain)], [program, str(tmp_path / "absent")]]
    assert [subprocess.run(one, check=False).returncode for one in started] == [125, 126, 127]


def test_init_keeps_no_descriptor_of_the_agent(program: str) -> None:
    read, write = os.pipe()
    code = "import os, time; os.closerange(0, 64); time.sleep(60)"
    with subprocess.Popen([program, "/usr/bin/python3", "-I", "-c", code], pass_fds=(write,)) as child:
        os.close(write)
        try:
            assert os.read(read, 1) == b""  # the end of file, while the agent lives
            assert child.poll() is None
        finally:
            child.send_signal(signal.SIGTERM)
            os.close(read)
    assert child.returncode == 143


def test_init_passes_mask_and_environment_on(program: str) -> None:
    code = "import os, signal; print(sorted(signal.pthread_sigmask(0, [])), os.environ['KEY'], os.getppid())"
    with subprocess.Popen(
        [program, "/usr/bin/python3", "-I", "-c", code], env={"KEY": "value"}, stdout=subprocess.PIPE, text=True
    ) as child:
        out, _ = child.communicate()
    assert out == f"[] value {child.pid}\n"
