"""covenant doctor on this machine, and on machines broken in ways that have been seen."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox import doctor
from sandbox.config import Config
from sandbox.host import runsc_probe
from sandbox.kernel.cgroup import cgroup

_ENTRY = [sys.executable, "-c", "from covenant.cli.main import entry; entry()", "doctor"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "state").mkdir(mode=0o700)
    return Config(state=tmp_path / "state")


# Bound before a test replaces it: patches of a test are still there when its traces are read.
_HIERARCHIES = cgroup.Hierarchies.read


def _traces() -> set[str]:
    """Return what a probe could leave: cgroups and processes with its name, directories in /tmp."""
    mounts = _HIERARCHIES().mounts.values()
    found = {str(p) for m in set(mounts) for p in m.glob("covenant/doctor-*")}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"runsc" in line and b"doctor-" in line:
                found.add(f"process {entry.name}")
    return found | {str(p) for p in Path("/tmp").glob("covenant-doctor-*")}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = _traces()
    yield
    assert _traces() - before == set()


def _check(report: doctor.Report, name: str) -> doctor.Check:
    return next(c for c in report.checks if c.name == name)


def test_this_machine_can_enforce(tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = subprocess.run(
        [*_ENTRY, "--json"], env={**os.environ, "COVENANT_HOME": str(home)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert (document["kind"], document["enforceable"]) == ("doctor", True)
    found = {c["name"]: c for c in document["checks"]}
    assert "Seccomp: 2" in found["runsc live"]["found"]
    assert "read back" in found["cgroup limits"]["found"]
    assert all(c["mend"] for c in document["checks"] if c["status"] != "ok")
    assert all(c["enforces"] for c in document["checks"])


# Everything is imported before the rights go: the clone may lie where only root can read.
_AS_NOBODY = """
import os, sys
from covenant.cli import main; from covenant.cli.run import doctor
import sandbox.doctor, sandbox.config
uid, gid, home = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.setgroups([]); os.setgid(gid); os.setuid(uid)
os.environ["COVENANT_HOME"] = home
sys.argv = ["covenant", "doctor", "--json"]
main.entry()
"""


def test_without_root_it_says_what_could_not_be_probed() -> None:
    nobody = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        os.chown(home, nobody.pw_uid, nobody.pw_gid)
        command = [sys.executable, "-c", _AS_NOBODY, str(nobody.pw_uid), str(nobody.pw_gid), str(home)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    document = json.loads(done.stdout)
    assert "checks" in document, done
    found = {c["name"]: c["status"] for c in document["checks"]}
    assert done.returncode == 1
    assert document["enforceable"] is False
    assert {found["root"], found["runsc live"], found["cgroup limits"]} == {"unknown"}
    assert found["python3"] == "ok"


BROKEN: list[tuple[str, str, str]] = [
    ("hangs", "sleep 600", "runsc hangs"),
    ("panics", "echo 'panic: runtime error: unknown Go release' >&2; exit 2", "runsc panics at start"),
    ("fails", "echo 'cannot create sandbox' >&2; exit 128", "cannot create sandbox"),
    ("leaves a child", "sleep 600 & sleep 600", "runsc hangs"),
    ("ignores TERM", "trap '' TERM INT; while :; do sleep 1; done", "runsc hangs"),
    ("closes its output", "exec >&- 2>&-; sleep 600", "runsc hangs"),
]


@pytest.mark.parametrize(("name", "body", "fault"), BROKEN)
def test_broken_runsc_is_named_in_bounded_time(
    config: Config, tmp_path: Path, name: str, body: str, fault: str
) -> None:
    fake = tmp_path / "runsc"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo runsc version 0.0~20250101.0; exit 0; }}\n{body}\n')
    fake.chmod(0o755)
    began = time.monotonic()
    outcome = runsc_probe.alive(config, fake, deadline_seconds=2)
    assert fault in outcome.fault
    assert time.monotonic() - began < 60
    report = doctor.examine(config.model_copy(update={"runsc": fake}), deadline_seconds=2)
    assert _check(report, "runsc").status == "ok"
    assert _check(report, "runsc live").status == "missing"
    assert "bookworm-backports" in _check(report, "runsc live").mend
    assert not report.enforceable


def test_one_that_stands_before_it_is_executed_hangs_no_doctor(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze every cgroup as soon as it is made."""
    enter = cgroup.Leaf.__enter__

    def stopped(self: cgroup.Leaf) -> cgroup.Leaf:
        leaf = enter(self)
        leaf.freeze()
        return leaf

    monkeypatch.setattr(cgroup.Leaf, "__enter__", stopped)
    assert "runsc hangs" in runsc_probe.alive(config, config.runsc, deadline_seconds=0.2).fault


def test_runsc_that_ignores_filter_is_found_out(config: Config, tmp_path: Path) -> None:
    """A wrapper that drops --oci-seccomp: everything starts, and nothing is denied."""
    fake = tmp_path / "runsc"
    fake.write_text(
        '#!/bin/sh\nfor a; do shift; [ "$a" = --oci-seccomp=true ] || set -- "$@" "$a"; done\n'
        f'exec {config.runsc} "$@"\n'
    )
    fake.chmod(0o755)
    assert "no filter is loaded" in runsc_probe.alive(config, fake, deadline_seconds=60).fault
    assert runsc_probe.alive(config, config.runsc, deadline_seconds=60).fault == ""


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("echo runsc version 0.0~20221219.0", "missing", "too old"),
        ("echo something else", "missing", "--version"),
        ("exit 3", "missing", "status 3"),
    ],
)
def test_old_or_strange_runsc_is_named(config: Config, tmp_path: Path, script: str, status: str, words: str) -> None:
    fake = tmp_path / "runsc"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] || exit 1\n{script}\n')
    fake.chmod(0o755)
    found = _check(doctor.examine(config.model_copy(update={"runsc": fake}), deadline_seconds=5), "runsc")
    assert (found.status, words in found.found) == (status, True)
    assert found.mend


def test_runsc_that_others_may_replace_is_not_started(config: Config, tmp_path: Path) -> None:
    fake = tmp_path / "runsc"
    fake.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    fake.chmod(0o777)
    report = doctor.examine(config.model_copy(update={"runsc": fake}), deadline_seconds=5)
    assert _check(report, "runsc").status == "missing"
    assert "written by others" in _check(report, "runsc").found
    assert not (tmp_path / "started").exists()


def _no_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup.Hierarchies, "read", classmethod(lambda cls, mountinfo=None: cls(0, {})))


def _old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.uname()
    old = os.uname_result((real.sysname, real.nodename, "5.4.0-150-generic", real.version, real.machine))
    monkeypatch.setattr(os, "uname", lambda: old)


@pytest.mark.parametrize(("arrange", "name"), [(_no_cgroups, "cgroup limits"), (_old_kernel, "kernel")])
def test_host_that_lacks_something_required_cannot_enforce(
    config: Config, monkeypatch: pytest.MonkeyPatch, arrange: Callable[[pytest.MonkeyPatch], None], name: str
) -> None:
    arrange(monkeypatch)
    report = doctor.examine(config, deadline_seconds=60)
    assert _check(report, name).status == "missing"
    assert _check(report, name).mend
    assert not report.enforceable
