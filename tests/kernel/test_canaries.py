"""The self-test of a policy tries forbidden acts under the artefacts of the run; after a failure nothing starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.compile.artefacts import Artefacts
from sandbox.lifecycle import probe_run
from sandbox.probes import denial_probes
from sandbox.runner import gvisor
from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.world import HEAD, TAIL, World

GOOD = HEAD + "answer = 1" + TAIL
PROGRAMS = '[permissions.executables]\nallow = ["/usr/bin/cat"]\n[permissions.filesystem]\nread = ["/usr/share/doc"]\n'


def self_tests(world: World) -> list[tuple[bool, str]]:
    """Whether each self-test passed, and what it said."""
    rows = [row["kind"] for row in world.rows()]
    return [(r["passed"], r["detail"]) for r in rows if r["type"] == "self_test" and r["name"] == "canaries"]


def test_each_policy_is_tried_once_day_and_after_any_change(world: World) -> None:
    world.configure(self_test=True)
    path = world.sign(world.package({"main.py": GOOD}))
    for _ in range(2):
        assert world.run(path).error is None
    assert self_tests(world) == [
        (True, f"policy {_digest(world)[:16]}: what it forbids is refused, what it allows is not")
    ]
    record = world.state / "closures" / "canaries.json"
    held = json.loads(record.read_text())
    for age_ms, again in ((86_000_000, 1), (86_400_001, 2)):
        record.write_text(json.dumps({key: when - age_ms for key, when in held.items()}))
        assert world.run(path).error is None
        assert len(self_tests(world)) == again
    # Another policy is another test, with programs and paths this time, and without a scratch.
    more: dict[str, Any] = {"more": PROGRAMS, "filesystem": "read-only-package"}
    assert world.run_code(GOOD, **more).error is None
    assert [passed for passed, _ in self_tests(world)] == [True] * 3


def _digest(world: World) -> str:
    rows = (row["kind"] for row in world.rows())
    return str(next(row["policy_digest"] for row in rows if row["type"] == "run_started"))


def test_without_it_each_run_says_so(world: World) -> None:
    assert world.run_code(GOOD).error is None
    started = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_started"]
    assert any("self_test = false" in line for line in started[0]["not_enforced"])
    assert self_tests(world) == []
    world.configure(self_test=True)
    assert world.run_code(GOOD).error is None
    started = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_started"]
    assert started[1]["not_enforced"] == []


def test_sandbox_wider_than_its_policy_runs_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test tries acts that a narrower policy forbids: a write, a program and a call."""
    strict: list[Artefacts] = []
    job = gvisor.run

    def noted(one: gvisor.SandboxSpec, **rest: Any) -> Any:
        strict.append(one.artefacts)
        return job(one, **rest)

    monkeypatch.setattr(gvisor, "run", noted)
    assert world.run_code(GOOD, filesystem="read-only-package").error is None
    real = denial_probes.plan
    monkeypatch.setattr(denial_probes, "plan", lambda artefacts: real(strict[0]))
    world.configure(self_test=True)
    wider: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "a file made in /tmp: it gave"),
        (
            {"filesystem": "read-only-package", "more": PROGRAMS},
            "no answer: a program was started in its place, or it was ended",
        ),
    )
    for wide, says in wider:
        with pytest.raises(errors.SelfTestError, match="what the policy forbids is not refused here") as caught:
            world.run_code(GOOD, **wide)
        assert any(says in fault for fault in caught.value.details["faults"]), caught.value.details
        kinds = [row["kind"].get("state", row["kind"]["type"]) for row in world.rows()]
        # The first is durable before the sandbox is there: one that takes the machine down leaves its name.
        assert kinds[-4:] == ["self_test_started", "self_test", "Rejected", "manifest_rejected"]
        assert not self_tests(world)[-1][0]
    # The control: the strict policy in its own sandbox.
    assert world.run_code(GOOD, filesystem="read-only-package").error is None


def test_policy_that_cannot_be_tried_has_the_fix_of_its_cause(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is no policy that is not held: `self_test = false` is no fix for it."""
    world.configure(self_test=True)

    def full(*_: object, **__: object) -> tuple[str, ...]:
        raise errors.VolumeError("COVENANT_STATE has less than 1088 MiB of free space", hint="make room")

    with monkeypatch.context() as patched:
        patched.setattr(probe_run, "attempt", full)
        with pytest.raises(errors.SelfTestError) as caught:
            world.run_code(GOOD)
    message = "the policy cannot be tried here: COVENANT_STATE has less than 1088 MiB of free space"
    assert (caught.value.message, caught.value.hint) == (message, "make room")
    assert not self_tests(world)[-1][0]
    assert world.run_code(GOOD).error is None


def test_with_network_connection_and_name_are_tried(
    tmp_path: Path, warm: Path, net: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net, self_test=True)
    grants = internet.entries(("93.184.216.34", "[80, 81]", "tcp"), ("api.example.com", "[80]", "tcp"))
    assert world.run_code(GOOD, network="full", more=grants).error is None
    assert [passed for passed, _ in self_tests(world)] == [True]
    # What is granted and answers is not refused: a canary that is sent there says so.
    monkeypatch.setattr(denial_probes, "_FORBIDDEN_ADDRESSES", (("93.184.216.34", 80),))
    monkeypatch.setattr(denial_probes, "_FORBIDDEN_NAMES", ("api.example.com",))
    monkeypatch.setattr(denial_probes, "_forbidden", lambda *_: True)
    (world.state / "closures" / "canaries.json").unlink()
    with pytest.raises(errors.SelfTestError) as caught:
        world.run_code(GOOD, network="full", more=grants)
    faults = caught.value.details["faults"]
    assert any("a connection to 93.184.216.34:80: it gave 0, and not refused by" in fault for fault in faults), faults
    assert any("name api.example.com" in fault and "not refused by the DNS gate" in fault for fault in faults), faults
    # The world's own refusal is not one of ours: no server listens there, and the connection fails as a refused one
    # does.
    monkeypatch.setattr(denial_probes, "_FORBIDDEN_ADDRESSES", (("93.184.216.34", 81),))
    monkeypatch.setattr(denial_probes, "_FORBIDDEN_NAMES", ())
    with pytest.raises(errors.SelfTestError) as caught:
        world.run_code(GOOD, network="full", more=grants)
    assert caught.value.details["faults"] == [
        "a connection to 93.184.216.34:81: ECONNREFUSED, and not refused by the gateway's firewall"
    ]
    assert net.leftovers() == []
