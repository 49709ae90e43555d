"""Fixtures that tests of the supervisor's files share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs: for tests of a kill, which keeps the kernel's pages, or with a disk of their own."""
    real = os.pwritev
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset, flags: real(fd, pieces, offset))
