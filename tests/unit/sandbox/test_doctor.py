"""The table of doctor's checks and what decides; the checks themselves run in tests/kernel/test_doctor.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox import config, doctor
from tests.kernel.tls_servers import Certificates


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


def test_authorities_are_checked_without_a_proxy(tmp_path: Path) -> None:
    """Each file that a gate could not read is named, with a fix that works."""
    whole = Certificates(tmp_path, "one.example").path.read_bytes()
    files = [tmp_path / name for name in ("one", "two", "three")]
    found = config.Config(state=tmp_path, tls=config.TlsSettings(ca=tuple(files)))
    (look,) = [row[3] for row in doctor.TABLE if row[0] == "authorities"]
    files[1].write_text("no certificate")
    files[2].write_bytes(whole)
    files[2].chmod(0o666)
    bad = look(found, 1.0)
    assert bad.status == doctor.Status.MISSING
    assert all(f"`{path}`" in bad.found for path in files)
    assert "name a file of certificates in PEM" in bad.mend
    assert f"chmod go-w {files[2]}" in bad.mend
    assert f"[tls] ca in {config.file_of(tmp_path)}" in bad.mend
    # The fix.
    for path in files:
        path.write_bytes(whole)
    files[2].chmod(0o644)
    assert look(found, 1.0).status == doctor.Status.OK
    assert look(config.Config(state=tmp_path), 1.0).status == doctor.Status.OK


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
