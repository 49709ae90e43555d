"""Check attestation from another process of a run that is still being started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy.lifecycle import State
from policy.prove.live import Layer, Standing
from sandbox.attest import live_runs, reference, verifier
from sandbox.attest.verifier import Examination
from sandbox.rundir import registry
from sandbox.storage import artefact_reader

DRIFT = Examination("one", (Layer("rights", Standing.WIDER, "a filter", "none"),))
HOLDS = Examination("one", (Layer("rights", Standing.EQUAL),))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made: Any = SimpleNamespace(agent_id="probe", policy_digest="digest", network=None)
    monkeypatch.setattr(reference.ReferenceValues, "read", lambda directory: made)
    monkeypatch.setattr(artefact_reader, "read", lambda directory: None)
    monkeypatch.setattr(live_runs, "_trusted", lambda *_: ((), ()))
    monkeypatch.setattr(live_runs, "AGAIN_SECONDS", 0.001)
    directory = tmp_path / "runs" / "one"
    directory.mkdir(parents=True)
    (directory / reference.RECORD).touch()
    return directory


def _answers(monkeypatch: pytest.MonkeyPatch, run: Path, *reports: Examination) -> tuple[bool, int]:
    """Whether it holds, and how many looks that took; the last report is what every further look comes to."""
    looks: list[verifier.VerifierCache] = []

    def examine(made: object, artefacts: object, known: verifier.VerifierCache, *, state: Path) -> Examination:
        looks.append(known)
        return reports[min(len(looks), len(reports)) - 1]

    monkeypatch.setattr(verifier, "examine", examine)
    answer = live_runs.answer(run.parents[1], "one", {})
    assert answer is not None
    # A look must not reuse an earlier look's facts about a process that was still being started.
    assert len({id(known) for known in looks}) == len(looks)
    return answer.holds, len(looks)


def test_what_is_just_being_made_is_looked_at_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / registry.STATE).write_text(f"{State.ISOLATED}\n")
    assert _answers(monkeypatch, run, DRIFT, DRIFT, HOLDS) == (True, 3)
    assert _answers(monkeypatch, run, HOLDS) == (True, 1)


@pytest.mark.parametrize("state", [State.RUNNING, State.SUSPENDED, None])
def test_drift_of_any_other_is_told_at_once(run: Path, monkeypatch: pytest.MonkeyPatch, state: State | None) -> None:
    if state is not None:
        (run / registry.STATE).write_text(f"{state}\n")
    assert _answers(monkeypatch, run, DRIFT, HOLDS) == (False, 1)


def test_one_that_never_comes_to_stand_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / registry.STATE).write_text(f"{State.ISOLATED}\n")
    monkeypatch.setattr(live_runs, "PATIENCE_SECONDS", 0.05)
    holds, looks = _answers(monkeypatch, run, DRIFT)
    assert not holds
    assert looks > 1
