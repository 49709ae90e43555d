"""Check a machine without free memory or without MemAvailable: the reader never assumes more than is reported free."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sandbox.host import memory

# Half of a GiB is free, and as much again cached, all of it in a tmpfs.
REST = "MemTotal: 2097152 kB\nMemFree: 524288 kB\nBuffers: 0 kB\nCached: 524288 kB\nShmem: 524288 kB\nActive: 1 kB\n"
FILES = "Inactive: 1 kB\nSlab: 1 kB\nSReclaimable: 0 kB\nActive(file): 262144 kB\nInactive(file): 262144 kB\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("MemAvailable: 409600 kB\n", 400),
        # The kernel's watermarks and reserves take the rest.
        ("MemAvailable: 0 kB\n", 0),
        # lxcfs may show a container the host's MemAvailable beside the container's own total.
        ("MemAvailable: 99999999 kB\n", 512),
        ("", 512),
    ],
    ids=["said", "none left", "more than there is", "not said"],
)
@pytest.mark.parametrize("zones", [False, True])
def test_what_is_available_is_never_more_than_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: int, zones: bool
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    (tmp_path / "meminfo").write_text(REST + line + FILES)
    if zones:
        (tmp_path / "zoneinfo").write_text("Node 0, zone Normal\n        low      1000\n")
    assert memory.read() == memory.Memory(2048, expected)


def test_line_no_number_is_error_of_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    for word in ("x kB", "", "-"):
        (tmp_path / "meminfo").write_text(f"{REST}MemAvailable: {word}\n{FILES}")
        with pytest.raises(OSError, match="meminfo"):
            memory.read()
