"""The table of doctor's checks and what decides; the checks themselves run in tests/kernel/test_doctor.py."""

from __future__ import annotations

import pytest

from sandbox import doctor


def _report(**statuses: str) -> doctor.Report:
    return doctor.Report(
        tuple(doctor.Check(n, doctor.Status(s), "", "", required=n != "optional") for n, s in statuses.items())
    )


def test_only_required_checks_decide() -> None:
    assert _report(root="ok", kernel="degraded", optional="missing").enforceable
    assert not _report(root="ok", kernel="missing").enforceable
    assert not _report(root="unknown", kernel="ok").enforceable, "what could not be looked at is no yes"


def test_table_names_each_check_once_and_what_it_enforces() -> None:
    names = [row[0] for row in doctor.TABLE]
    assert len(set(names)) == len(names)
    assert all(row[2] for row in doctor.TABLE)
    assert {row[0] for row in doctor.TABLE if row[1]} == {
        "root", "machine", "kernel", "runsc", "runsc live", "cgroup limits",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "date"),
    [("0.0~20240729.0", 20240729), ("release-20251103.0", 20251103), ("0.0~20221219.0-1+b3", 20221219), ("main", 0)],
)
def test_release_dates(version: str, date: int) -> None:
    assert doctor.release_date(version) == date


@pytest.mark.parametrize(
    ("release", "version"), [("6.1.0-18-amd64", (6, 1)), ("6.18.44-fc", (6, 18)), ("5.4", (5, 4)), ("x", (0, 0))]
)
def test_kernel_versions(release: str, version: tuple[int, int]) -> None:
    assert doctor.kernel_version(release) == version
