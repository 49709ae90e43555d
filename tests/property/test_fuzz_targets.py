"""Each fuzzing target with a few hundred of its inputs, the same each time; `make fuzz` gives it many more."""

from __future__ import annotations

import pytest

from policy import errors
from tests.fuzz import drive, targets
from tests.fuzz.source import JsonSource, Source

INPUTS = {target.name: 300 if target.share > 2 else 40 for target in targets.ALL}


@pytest.mark.parametrize("target", targets.ALL, ids=lambda t: t.name)
def test_nothing_breaks_and_nothing_false_is_accepted(target: drive.Target) -> None:
    outcome = drive.run(target, INPUTS[target.name], "smoke")
    assert outcome.finds == {}
    assert outcome.accepted, "nothing was accepted, so nothing was checked"
    assert len(outcome.answers) >= (1 if outcome.accepted == outcome.inputs else 2)


def test_target_has_one_name() -> None:
    assert len({target.name for target in targets.ALL}) == len(targets.ALL)


def _broken(raw: bytes) -> str:
    if b"9" in raw:
        raise KeyError("a crash")
    if b"8" in raw:
        raise errors.ManifestError("a message with \x1b[31m in it")
    assert b"7" not in raw, "something false was accepted"
    if b"6" in raw:
        raise errors.ManifestError("no")
    return "yes"


def test_driver_sees_what_is_wrong() -> None:
    target = drive.Target("broken", _broken, lambda: (b"123456789", b"1"), (b"6", b"7", b"8", b"9"))
    found = drive.run(target, 500, "seed")
    assert {key.split(" ")[0] for key in found.finds} == {"KeyError", "AssertionError", "ManifestError:"}
    assert found.accepted
    assert found.inputs == 500
    assert drive.run(target, 500, "seed").answers == found.answers


def test_input_that_takes_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(raw: bytes) -> str:
        while raw:
            pass
        return "empty"

    monkeypatch.setattr(drive, "INPUT_SECONDS", 0.05)
    found = drive.run(drive.Target("endless", endless, lambda: (b"1",)), 1, "seed")
    assert [key.split(" ")[0] for key in found.finds] == ["_TooSlow"]


@pytest.mark.parametrize("made", [Source, JsonSource])
def test_inputs_are_same_each_time_and_differ(made: type[Source]) -> None:
    def first(seed: str) -> list[bytes]:
        source = made([b'{"a":[1,"x"]}'], [b"word"], seed)
        return [source.draw() for _ in range(200)]

    assert first("one") == first("one")
    assert first("one") != first("two")
    assert len(set(first("one"))) >= 100
