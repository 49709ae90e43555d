"""The machine's memory, as psutil reads it, and beside /proc itself."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from policy import standby
from sandbox.host import memory
from sandbox.host.memory import Memory

OTHERS = "".join(
    f"{name}: 1 kB\n" for name in ("Buffers", "Cached", "SReclaimable", "Shmem", "Active", "Inactive", "Slab")
)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    return tmp_path


def test_it_is_what_kernel_says() -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = memory.read()
    assert found.total_mb == int(fields["MemTotal"].split()[0]) // 1024
    assert 0 < found.available_mb <= found.total_mb


def test_pool_reads_it_with_and_without_pressure(proc: Path) -> None:
    (proc / "meminfo").write_text(f"MemTotal:  2048000 kB\nMemFree: 1 kB\nMemAvailable:  1024000 kB\n{OTHERS}")
    assert memory.read() == Memory(2000, 1000)
    assert memory.machine() == standby.Machine(2000, 1000)
    (proc / "pressure").mkdir()
    lines = "some avg10=1.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.25 avg60=0 avg300=0 total=0\n"
    (proc / "pressure" / "memory").write_text(lines)
    assert memory.machine() == standby.Machine(2000, 1000, 1.5, 0.25)
    for torn in ("", "some\n", "some avg10=\n", "some avg10=x\n"):
        (proc / "pressure" / "memory").write_text(torn)
        assert memory.machine() == standby.Machine(2000, 1000)


@pytest.mark.parametrize("text", [None, "", "MemFree: 1 kB\n", "MemTotal: x kB\nMemFree: 1 kB\n"])
def test_what_is_not_said_is_error_of_machines(proc: Path, text: str | None) -> None:
    """The main loop of the supervisor takes those, and no others."""
    if text is not None:
        (proc / "meminfo").write_text(text)
    with pytest.raises(OSError, match="meminfo"):
        memory.read()
