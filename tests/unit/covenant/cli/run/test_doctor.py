"""Check the output and exit status of `covenant doctor` for a report; tests/kernel/test_doctor.py has the checks."""

from __future__ import annotations

import json

import click.testing
import pytest

from covenant.cli import main
from sandbox import doctor


def _invoke(monkeypatch: pytest.MonkeyPatch, *found: doctor.Check, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
    seen: list[float] = []

    def examine(config: object, *, deadline_seconds: float) -> doctor.Report:
        seen.append(deadline_seconds)
        return doctor.Report(found)

    monkeypatch.setattr(doctor, "examine", examine)
    done = click.testing.CliRunner().invoke(main.cli, ["doctor", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert seen == [7.0 if "--deadline" in arguments else 60.0]
    return done.exit_code, done.stdout


GOOD = doctor.Check("root", doctor.Status.OK, "everything", "uid 0", required=True)
OPTIONAL = doctor.Check("nft", doctor.Status.MISSING, "network modes", "no \x1b[31mnft", "apt-get install nftables")
UNKNOWN = doctor.Check("runsc live", doctor.Status.UNKNOWN, "calls", "not probed", "run as root", required=True)


def test_host_that_can_enforce(monkeypatch: pytest.MonkeyPatch) -> None:
    status, out = _invoke(monkeypatch, GOOD, OPTIONAL, arguments=("--deadline", "7"))
    assert status == 0
    assert "linux-gvisor can be enforced" in out
    assert "fix: apt-get install nftables" in out
    assert "enforces: network modes" in out
    assert "\x1b" not in out
    assert out.count("fix:") == 1, "what is ok needs none"


def test_host_of_which_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    status, out = _invoke(monkeypatch, GOOD, OPTIONAL, UNKNOWN)
    assert status == 1
    assert "cannot be said to be enforced on this host: runsc live" in out


def test_one_json_document(monkeypatch: pytest.MonkeyPatch) -> None:
    status, out = _invoke(monkeypatch, GOOD, UNKNOWN, arguments=("--json",))
    document = json.loads(out)
    assert (status, document["kind"], document["enforceable"]) == (1, "doctor", False)
    assert document["checks"][1] == {
        "name": "runsc live",
        "status": "unknown",
        "enforces": "calls",
        "found": "not probed",
        "mend": "run as root",
        "required": True,
    }
