"""Which tracer of which thread of a run is drift, with processes as they could be."""

from __future__ import annotations

import os

import pytest

from sandbox.attest import tracers as attest_tracers
from sandbox.kernel import procfs
from sandbox.kernel.procfs import Name
from tests.unit.sandbox.attest.test_verifier import FAMILY

SHIM, GATE = Name(1, 1), Name(20, 20)
# One thread more of each, whose number is 100 higher.
SANDBOX_THREAD = 112


@pytest.fixture
def tracers(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[int, int]]:
    """By process: traced thread to tracer. The test fills it."""
    found: dict[int, dict[int, int]] = {}
    names = {name.pid: name for name in (*(one.name for one in FAMILY.all()), SHIM, GATE)}
    monkeypatch.setattr(attest_tracers, "PASSING_SECONDS", 0.0)
    monkeypatch.setattr(procfs, "name", names.get)
    monkeypatch.setattr(procfs, "parent", lambda pid: 1)
    monkeypatch.setattr(procfs, "tracers", lambda pid: found.get(pid, {}))
    monkeypatch.setattr(os.path, "exists", lambda path: path == f"/proc/12/task/{SANDBOX_THREAD}")
    return found


def drift() -> list[str]:
    """The processes that do not hold, by kind and number."""
    layers = list(attest_tracers.judge(FAMILY, [GATE]))
    assert {layer.name for layer in layers} <= {"process"}
    return [layer.expected.removeprefix("no thread of ").removesuffix(" is traced") for layer in layers]


@pytest.mark.parametrize(
    ("pid", "kind"),
    [(10, "runsc run"), (11, "gofer"), (12, "sandbox"), (13, "stub"), (1, "shim"), (20, "gate")],
)
def test_any_thread_traced_by_others_is_drift(tracers: dict[int, dict[int, int]], pid: int, kind: str) -> None:
    assert drift() == [], "control"
    for thread in (pid, pid + 100):
        tracers[pid] = {thread: 999}
        assert drift() == [f"{kind} {pid}"]


def test_sandbox_may_trace_its_stub_alone(tracers: dict[int, dict[int, int]]) -> None:
    tracers[13] = {13: SANDBOX_THREAD}
    assert drift() == []
    for pid in (10, 11, 12, 1, 20):
        tracers.clear()
        tracers[pid] = {pid: SANDBOX_THREAD}
        assert len(drift()) == 1, pid


def test_reused_number_is_no_drift(tracers: dict[int, dict[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    tracers[20] = {20: 999}
    assert drift() == ["gate 20"], "control"
    names = {SHIM.pid: SHIM, GATE.pid: Name(GATE.pid, 77)}
    monkeypatch.setattr(procfs, "name", names.get)
    assert drift() == []
