"""Check a tampered starter and hostile steps: it executes the program after every step succeeded, or not at all."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox import doctor
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import launcher, spawn

HERE = proc_launch.Launch("/bin/echo", ["echo", "here"], {})
# BPF_RET with SECCOMP_RET_ALLOW, and with SECCOMP_RET_ERRNO | EPERM (linux/filter.h, linux/seccomp.h).
ALLOW, REFUSE = (struct.pack("=HBBI", 0x06, 0, 0, value).hex() for value in (0x7FFF0000, 0x00050001))


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a copy of the starter in its place."""
    path = tmp_path / "covenant-start"
    shutil.copy(launcher.PROGRAM, path)
    monkeypatch.setattr(launcher, "PROGRAM", str(path))
    return path


def _said() -> bytes:
    with spawn.spawn(HERE) as child:
        assert child.reap() == 0
        return os.read(child.stdout, 100)


def _of_another_machine(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[18:20] = struct.pack("=H", 0xFFFF)  # e_machine, elf(5)
    path.write_bytes(raw)


def _a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "nothing in it": lambda path: path.write_bytes(b""),
    "no program": lambda path: path.write_bytes(b"not a program\n"),
    "cut off in its head": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "another machine's": _of_another_machine,
    "a directory": _a_directory,
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_starter_that_cannot_be_executed_starts_nothing_and_says_which_and_what_to_do(placed: Path, case: str) -> None:
    assert _said() == b"here\n", "the control"
    UNUSABLE[case](placed)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.KernelError, match="cannot execute") as caught:
        spawn.spawn(HERE)
    assert str(placed) in caught.value.message
    assert "remove that file" in caught.value.hint
    assert sorted(os.listdir("/proc/self/fd")) == before
    # Follow the hint.
    shutil.rmtree(placed) if placed.is_dir() else placed.unlink()
    assert _said() == b"here\n"


def test_starter_of_another_version_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "VERSION", "1")
    with pytest.raises(errors.KernelError, match="understand") as caught:
        spawn.spawn(HERE)
    assert "restart a supervisor" in caught.value.hint


@pytest.mark.parametrize(
    "launch",
    [
        proc_launch.Launch("/bin/echo", ["echo", "he\0re"], {}),
        proc_launch.Launch("/bin/echo", ["echo"], {"ONE": "t\0wo"}),
        proc_launch.Launch("/bin/ec\0ho", ["echo"], {}),
        proc_launch.Launch("/bin/echo", ["echo"], {}, directory="/\0"),
    ],
    ids=["argument", "environment", "program", "directory"],
)
def test_word_that_no_program_can_be_given_is_error_of_starts(way: str, launch: proc_launch.Launch) -> None:
    """The error is the project's own: the code that starts a run catches no others."""
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.KernelError, match="null byte"):
        spawn.spawn(launch)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_newline_is_character_of_word(way: str) -> None:
    with spawn.spawn(proc_launch.Launch("/bin/echo", ["echo", "a\nkeep\n3"], {})) as child:
        assert child.reap() == 0
        assert os.read(child.stdout, 100) == b"a\nkeep\n3\n"


# --- hostile steps ------------------------------------------------------------------------------------------


class Told:
    """The result of a list of steps that ends with a program that prints ``here``."""

    def __init__(self, *words: str, pass_fds: tuple[int, ...] = ()) -> None:
        read, write = os.pipe()
        with os.fdopen(read, "rb") as report:
            try:
                head = ["covenant-start", "2", str(os.getpid()), str(write)]
                done = subprocess.run(
                    [*head, *words, "execute", "/bin/echo", "echo", "here"],
                    executable=launcher.PROGRAM, capture_output=True, pass_fds=[write, *pass_fds], check=False,
                    timeout=60,
                )  # fmt: skip
            finally:
                os.close(write)
            self.status, self.printed, self.report = done.returncode, done.stdout, report.read()

    @property
    def failed(self) -> tuple[int, int] | None:
        """Return the step and error number, or None if the program was executed, which sends no report."""
        if self.status == 0:
            assert (self.printed, self.report) == (b"here\n", b"")
            return None
        assert (self.status, self.printed) == (127, b""), "a step failed, and yet something ran"
        step, error = json.loads(self.report)
        return step, error


def _steps(folder: Path) -> list[tuple[tuple[str, ...], int]]:
    """Return harmless steps, each with its error number; 0 for none."""
    (folder / "procs").touch()
    (folder / "link").symlink_to(folder / "procs")
    no_call = struct.pack("=HBBI", 0xFF, 0, 0, 0).hex()
    return [
        (("die",), 0),
        (("directory", str(folder)), 0),
        (("directory", ""), errno.ENOENT),
        (("directory", str(folder / "procs")), errno.ENOTDIR),
        (("join", str(folder / "procs")), 0),
        (("join", str(folder / "link")), errno.ELOOP),
        (("keep", "2"), 0),
        (("keep", str(1 << 31)), errno.EINVAL),
        (("keep", "-0x3"), errno.EINVAL),
        (("network", "2"), errno.EINVAL),
        (("network", "2147483647"), errno.EBADF),
        (("filter", ALLOW), 0),
        (("filter", ALLOW * 64), 0),
        (("filter", ALLOW * 65), errno.EINVAL),
        (("filter", no_call), errno.EINVAL),
        (("filter", "0" * 100_000), errno.EINVAL),
        (("filter", "é" * 8), errno.EINVAL),
        (("Die",), errno.EPROTO),
        (("",), errno.EPROTO),
        (("execute\n",), errno.EPROTO),
        (("2", "die"), errno.EPROTO),
    ]


def test_of_any_list_of_steps_first_that_fails_is_told_and_nothing_is_executed(tmp_path: Path) -> None:
    """Each run draws new steps; a failure shows the seed."""
    steps, seed = _steps(tmp_path), random.SystemRandom().randrange(1 << 32)
    draw, failures = random.Random(seed), 0
    for _ in range(250):
        chosen = [draw.choice(steps) for _ in range(draw.randrange(9))]
        found = Told(*(word for words, _ in chosen for word in words)).failed
        wrong = ((number, error) for number, (_, error) in enumerate(chosen) if error)
        expected = next(wrong, None)
        assert found == expected, (seed, [words for words, _ in chosen])
        failures += expected is not None
    assert 0 < failures < 250, "the control: both were drawn"


def test_descriptors_not_open_are_found_before_program_is(tmp_path: Path) -> None:
    """``keep`` only records its descriptor, so the last step has the error."""
    assert Told("keep", "999").failed == (1, errno.EBADF)
    assert Told("keep", "2", "keep", "2").failed is None
    fd = os.open(tmp_path, os.O_RDONLY)
    assert Told("keep", str(fd), pass_fds=(fd,)).failed is None
    os.close(fd)


def test_filter_that_refuses_what_is_left_to_do_ends_it() -> None:
    """The filter is loaded before the last step: if it refuses that step, no program runs, even without a report."""
    told = Told("filter", REFUSE)
    assert told.printed == b""
    assert told.status != 0


@pytest.mark.parametrize("report", ["2", "-1", "x", "999"])
def test_without_report_nothing_that_failed_is_executed(report: str) -> None:
    head = ["covenant-start", "2", str(os.getpid()), report]
    done = subprocess.run(
        [*head, "directory", "/nowhere", "execute", "/bin/echo", "echo", "here"],
        executable=launcher.PROGRAM, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (127, b"", b"")


@pytest.mark.parametrize("count", range(1, 7))
def test_too_few_words_are_no_start(count: int) -> None:
    words = ["covenant-start", "2", str(os.getpid()), "2", "execute", "/bin/echo"]
    done = subprocess.run(words[:count], executable=launcher.PROGRAM, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (127, b"", b"")


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (_of_another_machine, "Exec format error"),
        (lambda path: path.write_bytes(path.read_bytes()[:4096]), "status 139"),
    ],
    ids=["of another machine", "cut off"],
)
def test_doctor_says_of_starter_that_cannot_run_that_it_does_not(
    placed: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], object], found: str
) -> None:
    """An earlier doctor reported ok if the starter's file existed."""
    monkeypatch.setattr(doctor, "TABLE", tuple(row for row in doctor.TABLE if row[0] == "starter"))
    config: Any = None  # which this check does not use

    def said() -> doctor.Check:
        (check,) = doctor.examine(config, deadline_seconds=60.0).checks
        return check

    assert said().status is doctor.Status.OK
    harm(placed)
    assert said().status is doctor.Status.MISSING
    assert str(placed) in said().found
    assert found in said().found
    assert said().mend == launcher.MEND
