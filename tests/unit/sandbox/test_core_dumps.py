"""Core dumps of processes that really crash, and the limit that runs have."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from policy import core_dumps as decision
from sandbox import doctor
from sandbox.kernel.proc import launch, spawn

ROOT = Path(__file__).resolve().parents[3]
CAP_SYS_RESOURCE = 24  # linux/capability.h


def crash(before: str, folder: Path) -> tuple[int, bool]:
    """The signal that ended a process of its own, and whether the kernel dumped it, in this empty directory."""
    code = f"import os, resource, sys; sys.path[:0] = [{str(ROOT)!r}]; from sandbox import core_dumps\n"
    # Of what is dumped nothing but headers: the control shall leave little with a handler of this host.
    code += f"open('/proc/self/coredump_filter', 'w').write('0')\n{before}\nos.abort()"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    status = os.waitpid(child.pid, 0)[1]
    child.returncode = 0
    return os.WTERMSIG(status), os.WCOREDUMP(status)


def test_crash_dumps_where_nothing_forbids_it(tmp_path: Path) -> None:
    """The control: the same crash, with room for a core file."""
    size = "resource.setrlimit(resource.RLIMIT_CORE, (2**26, 2**26))"
    assert crash(size, tmp_path) == (signal.SIGABRT, True)


def test_crash_dumps_nothing_under_limit(tmp_path: Path) -> None:
    assert crash("core_dumps.forbid()", tmp_path) == (signal.SIGABRT, False)
    assert list(tmp_path.iterdir()) == []


def test_hard_limit_of_zero_is_raised_or_kept() -> None:
    code = (
        "import os, resource; from sandbox import core_dumps\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "{}core_dumps.forbid(); print(*resource.getrlimit(resource.RLIMIT_CORE))"
    )
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mine = "1 1" if int(status["CapEff"], 16) >> CAP_SYS_RESOURCE & 1 else "0 0"
    for become, said in (("", mine), ("os.setresuid(65534, 65534, 65534)\n", "0 0")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(become)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == said


def test_what_is_started_has_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        with spawn.spawn(launch.Launch("/bin/sleep", ["sleep", "60"], {})) as child:
            assert resource.prlimit(child.pid, resource.RLIMIT_CORE) == (decision.LIMIT, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


@pytest.mark.parametrize(
    ("pattern", "status", "found"),
    [
        ("core", doctor.Status.OK, "names a file"),
        ("|/usr/lib/systemd/systemd-coredump %P", doctor.Status.DEGRADED, "gets no dump of a run"),
        ("@/run/x.socket", doctor.Status.DEGRADED, "whatever its limit"),
    ],
)
def test_doctor_says_who_gets_dump(pattern: str, status: doctor.Status, found: str) -> None:
    finding = doctor.core_dumps_of(pattern)
    assert finding.status == status
    assert found in finding.found
    assert bool(finding.mend) == (status != doctor.Status.OK)


def test_mend_of_doctor_makes_it_fine() -> None:
    for pattern in ("|handler", "@/run/x.socket"):
        assert doctor.core_dumps_of(pattern).mend.startswith("sysctl -w kernel.core_pattern=core")
    assert doctor.core_dumps_of("core").status == doctor.Status.OK
