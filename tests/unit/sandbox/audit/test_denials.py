"""The collector between what refuses and the log."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy import denials, errors
from policy.compile.artefacts import NAMES, Artefacts
from policy.denials import Denial, Row
from sandbox.audit.denials import DenialLog, every_program_is_granted, failed_calls, refused_calls, traced
from sandbox.kernel.runsc import debug_log
from tests.unit.policy.compile import sample

NAME = Denial("dns", "api.example.com", "not_granted")
# A row is some 1 ms here: what one turn may write without holding a clock up by more than it is held to.
AT_ONCE = 4


class Log:
    """A clock that stands until it is moved, and the rows that were written."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.seconds = 100.0
        self.denials = DenialLog(self.rows.append, clock=lambda: self.seconds)

    def look(self, seconds: float) -> None:
        self.seconds += seconds
        assert self.denials.round().look() is None


def test_rows_are_written_at_once_then_by_round_and_at_end() -> None:
    log = Log()
    for _ in range(100_000):
        log.denials.told(NAME)
    assert log.rows == [Row(NAME, 1)]
    log.look(0.5)
    assert len(log.rows) == 1
    log.look(0.5)
    assert log.rows == [Row(NAME, 1), Row(NAME, 99_999)]
    log.denials.told(NAME)
    log.denials.flush()
    assert [row.count for row in log.rows] == [1, 99_999, 1]
    assert log.denials.totals == (Row(NAME, 100_001),)


@pytest.mark.parametrize(
    ("error", "denial"),
    [
        (errors.OutOfMemoryError("more"), Denial("memory", "memory_mb", "out_of_memory")),
        (errors.DeadlineError("late", clock="cpu_ms_per_task"), Denial("time", "cpu_ms_per_task", "deadline")),
        (errors.CpuTimeError("spent", clock="cpu_time_ms"), Denial("time", "cpu_time_ms", "cpu_time")),
    ],
)
def test_limit_that_ended_run_is_denial(error: errors.RunError, denial: Denial) -> None:
    log = Log()
    log.denials.ended_by(error)
    assert log.rows == [Row(denial, 1)]
    assert denial.grant is not None


@pytest.mark.parametrize("error", [None, errors.AgentFailedError("x"), errors.KernelError("x"), errors.GateError("x")])
def test_any_other_end_is_none(error: errors.CovenantError | None) -> None:
    log = Log()
    log.denials.ended_by(error)
    assert log.rows == []


def test_row_that_cannot_be_written_is_error_at_once() -> None:
    def full(row: Row) -> None:
        raise errors.LedgerError("no space")

    with pytest.raises(errors.LedgerError):
        DenialLog(full).told(NAME)


def test_refused_call_is_one_of_its_kind() -> None:
    log = Log()
    tell = refused_calls(sample.compiled(sample.manifest()), log.denials.told)
    for name in ("getcpu", "ioctl", "clone3", "execve", "execveat", "#999"):
        tell(name, 2)
    assert [(row.denial.layer, row.denial.target, row.denial.code) for row in log.rows] == [
        ("syscall", "getcpu", "not_granted"),
        ("syscall", "ioctl", "arguments"),
        ("exec", "execve", "not_granted"),
        ("syscall", "#999", "not_granted"),
    ]
    log.denials.flush()
    assert log.rows[-1] == Row(Denial("exec", "execve", "not_granted"), 2)


def test_every_layer_has_words() -> None:
    assert all(denials.LAYERS.values())


def test_flood_of_different_denials_writes_few_rows_turn_and_loses_none() -> None:
    """Each is a row at once, and each row is durable: written in a row they would hold the run's clocks up."""
    log = Log()
    for number in range(500):
        log.denials.told(Denial("syscall", f"#{number}", "not_granted"))
        log.denials.told(Denial("syscall", f"#{number}", "not_granted"), count=2)
    assert len(log.rows) == AT_ONCE
    one = log.denials.round()
    assert one.wait is not None
    turns = 0
    while one.wait() < one.seconds:
        before = len(log.rows)
        log.look(one.wait())
        assert len(log.rows) - before <= AT_ONCE
        turns += 1
    assert turns > 100
    log.denials.flush()
    assert sum(row.count for row in log.rows) == 1500


def test_run_that_ends_in_flood_writes_what_waits() -> None:
    log = Log()
    for number in range(50):
        log.denials.told(Denial("dns", f"{number}.example.com", "name_not_granted"))
    log.denials.flush()
    assert [row.denial.target for row in log.rows] == [f"{number}.example.com" for number in range(50)]


@pytest.mark.parametrize(
    ("call", "arguments", "number", "denial"),
    [
        ("clone", "CLONE_CHILD_CLEARTID|0x11, 0x0, 0x0, 0x7e, 0x0", 11, ("pids", "pids_max", "too_many")),
        ("clone", "CLONE_CHILD_CLEARTID|0x11, 0x0, 0x0, 0x7e, 0x0", 12, None),
        (
            "execve",
            '0x7f /usr/bin/grep, 0x7f ["/usr/bin/grep", "a, b"], 0x0',
            2,
            ("exec", "/usr/bin/grep", "not_granted"),
        ),
        ("execveat", "0x3 /usr/bin, 0x7f grep, 0x7f [], 0x0, 0x0", 13, ("exec", "/usr/bin/grep", "not_granted")),
        ("execve", '0x7f /usr/bin/grep, 0x7f ["x"], 0x0', 8, None),
        ("openat", "AT_FDCWD /workspace, 0xac /srv/x, O_RDONLY|O_CLOEXEC, 0o0", 2, ("path", "/srv/x", "not_granted")),
        ("openat", "AT_FDCWD /workspace, 0xac ../srv/y, O_RDONLY|0x0, 0o0", 2, ("path", "/srv/y", "not_granted")),
        ("open", "0xac /srv/x, O_WRONLY|O_CREAT, 0o644", 30, ("path", "/srv/x", "read_only")),
        ("open", "0xac /srv/x, O_RDONLY, 0o0", 13, None),
        ("openat", "AT_FDCWD /workspace, 0xac mine.txt, O_RDONLY, 0o0", 2, None),
        ("openat", "AT_FDCWD /workspace, 0xac /.covenant-prelude-file, O_WRONLY|O_CREAT, 0o600", 13, None),
        ("write", '0x3 /tmp/x, 0xbb "x"..., 0xf4240', 28, ("disk", "disk_mb", "full")),
        ("write", '0x3 /tmp/x, 0xbb "x"..., 0xf4240', 27, ("disk", "disk_mb", "full")),
        ("openat", "whatever an agent\udcff wrote", 2, None),
        ("openat", "", 2, None),
    ],
)
def test_failed_call_is_one_of_its_kind(
    call: str, arguments: str, number: int, denial: tuple[str, str, str] | None
) -> None:
    log = Log()
    failed_calls(log.denials.told)(debug_log.Failed(call, arguments, number), 3)
    assert log.rows == ([] if denial is None else [Row(Denial(*denial), 3)])


def test_missing_program_is_no_denial_of_whole_root() -> None:
    """A shell that looks for git along PATH is refused nothing where every program of the root may be started."""
    log = Log()
    tell = failed_calls(log.denials.told, every_program=True)
    tell(debug_log.Failed("execve", '0x7f /opt/own/bin/git, 0x7f ["git"], 0x0', 2), 3)
    assert log.rows == []
    tell(debug_log.Failed("execve", '0x7f /opt/own/data, 0x7f ["data"], 0x0', 13), 1)
    assert log.rows == [Row(Denial("exec", "/opt/own/data", "not_granted"), 1)]


@pytest.mark.parametrize(
    ("image", "granted"),
    [
        (None, False),
        ({"executable": []}, False),
        ({"executable": ["layer:a"]}, False),
        ({"executable": ["root"]}, True),
    ],
)
def test_every_program_is_granted_by_root(image: dict[str, Any] | None, granted: bool) -> None:
    root = {} if image is None else {"image": image}
    files = {**dict.fromkeys(NAMES, b"{}"), "mounts.json": msgspec.json.encode({"root": root})}
    assert every_program_is_granted(Artefacts(files)) == granted


def test_what_is_traced_are_calls_of_machine() -> None:
    assert traced(files=False, arch="x86_64") == ("clone", "fork", "vfork", "execve", "execveat")
    assert "fork" not in traced(files=False, arch="aarch64")
    assert {"openat", "write"} <= set(traced(files=True, arch="aarch64"))
