"""The patched loader under real runsc: it loads programs and refuses to be one. Each refusal beside its control.

In these roots execve is allowed: what is shown is that modes and the loader hold by themselves. The control is the same
root with the loader that the host has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox.config import Config
from sandbox.rootfs import closure, elf, loader_patch, skeleton
from tests.kernel import skeleton_runsc

LOADER = "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
LIBC = "/usr/lib/x86_64-linux-gnu/libc.so.6"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with python3 and the granted executable env; its loader is the patched one."""
    state = tmp_path_factory.mktemp("state")
    state.chmod(0o700)
    config = Config(state=state)
    closures = [closure.of_runtime("python3", config), closure.of_elf(Path("/usr/bin/env"), config)]
    return skeleton_runsc.skeleton(skeleton.Skeletons(state / "rootfs"), *closures)


@pytest.fixture(scope="module")
def control_root(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same root with the host's own loader, and libc executable as distributions install it."""
    copy = tmp_path_factory.mktemp("control") / "root"
    shutil.copytree(root, copy, symlinks=True)
    shutil.copyfile(LOADER, f"{copy}{LOADER}")
    os.chmod(f"{copy}{LIBC}", 0o755)
    return copy


# A program that is not executable, in a place that is not executable: what only a loader would run.
SPAWN = """
import os, shutil, sys
kind, *argv = sys.argv[1:]
if kind == "copy":
    shutil.copy("/usr/bin/env", "/tmp/copy"); os.chmod("/tmp/copy", 0o644)
pid = os.fork()
if not pid:
    try:
        os.execv(argv[0], argv)
    except OSError as e:
        print(type(e).__name__, flush=True)
        os._exit(99)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def _spawn(root: Path, *argv: str, kind: str = "plain") -> list[str]:
    done = skeleton_runsc.run(root, ["/usr/bin/python3", "-c", SPAWN, kind, *argv])
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().split("\n")[:-1]


def test_program_starts_through_patched_loader(root: Path) -> None:
    assert _spawn(root, "/usr/bin/env", "A=1", "/usr/bin/env", "-i", "B=2", "/usr/bin/env") == ["B=2", "0"]


def test_loader_refuses_to_run_file_and_original_runs_it(root: Path, control_root: Path) -> None:
    for loader in (LOADER, "/lib64/ld-linux-x86-64.so.2"):
        assert _spawn(root, loader, "/tmp/copy", "-i", "B=2", "/usr/bin/env", kind="copy") == ["126"]
    assert _spawn(control_root, LOADER, "/tmp/copy", "-i", "B=2", "/usr/bin/env", kind="copy") == ["B=2", "0"]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--list", "/usr/bin/env"], ["--verify", "/usr/bin/env"]])
def test_loader_does_nothing_else_either(root: Path, control_root: Path, arguments: list[str]) -> None:
    assert _spawn(root, LOADER, *arguments) == ["126"]
    assert _spawn(control_root, LOADER, *arguments)[-1] != "126"


def test_libc_cannot_be_started_and_executable_libc_can(root: Path, control_root: Path) -> None:
    """libc.so.6 has an entry of its own; at 0644 the kernel does not start it."""
    assert _spawn(root, LIBC) == ["PermissionError", "99"]
    assert "GNU C Library" in _spawn(control_root, LIBC)[0]


def test_written_file_starts_only_where_mount_allows_it(root: Path) -> None:
    """The tmpfs of these tests is not noexec, so that the copy's own mode is what refuses."""
    assert _spawn(root, "/tmp/copy", kind="copy") == ["PermissionError", "99"]


def test_loader_starts_first_process_of_sandbox(root: Path) -> None:
    done = skeleton_runsc.run(root, ["/usr/bin/env"])
    assert b"HOME=/tmp" in done.stdout, done.stderr
    refused = skeleton_runsc.run(root, [LOADER, "/usr/bin/env"])
    assert (refused.returncode, refused.stdout) == (loader_patch.REFUSED_STATUS, b"")


def test_host_s_kernel_agrees(tmp_path: Path) -> None:
    """Bare, with a harmless program: the same on Linux itself as under gVisor."""
    patched = tmp_path / "ld.so"
    patched.write_bytes(loader_patch.patch(Path(LOADER).read_bytes()))
    patched.chmod(0o755)
    assert elf.parse(patched.read_bytes(), name="ld.so").entry
    assert subprocess.run([patched, "/bin/true"]).returncode == loader_patch.REFUSED_STATUS
    assert subprocess.run([LOADER, "/bin/true"]).returncode == 0
    (tmp_path / "a.c").write_text("int main(void) { return 42; }\n")
    command = ["gcc", str(tmp_path / "a.c"), "-o", str(tmp_path / "a"), f"-Wl,--dynamic-linker={patched}"]
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "a"]).returncode == 42
