"""What tests of the supervisor's files have in common."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk: for what a kill leaves, which is what the kernel has, or where the test plays one."""
    real = os.pwritev
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset, flags: real(fd, pieces, offset))
