"""`--wait`: a refusal for a path in use is asked again, and no other one."""

from __future__ import annotations

import pytest

from covenant.cli.run import waiting
from policy import errors

HELD = errors.PathInUseError("run `12345678` writes `/srv/room`")


class Machine:
    """A clock that only sleep moves, and a run that is refused until a time."""

    def __init__(self, free_at: float, refusal: errors.CovenantError = HELD) -> None:
        self.now, self.asked, self._free_at, self._refusal = 0.0, 0, free_at, refusal

    def ask(self) -> str:
        self.asked += 1
        if self.now < self._free_at:
            raise self._refusal
        return "done"

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def until_free(self, seconds: float, *, again: bool = True) -> str:
        return waiting.until_free(seconds, self.ask, again=lambda: again, clock=lambda: self.now, sleep=self.sleep)


def test_free_path_is_asked_once(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(0)
    assert machine.until_free(60) == "done"
    assert (machine.asked, machine.now, capsys.readouterr().err) == (1, 0, "")


@pytest.mark.parametrize("refusal", [HELD, errors.VolumeBusyError("a command uses it")])
def test_path_in_use_is_asked_again(refusal: errors.CovenantError, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(30, refusal)
    assert machine.until_free(60) == "done"
    assert 30 <= machine.now <= 35
    assert machine.asked < 15
    assert capsys.readouterr().err == f"waiting: {refusal.message}\n"


@pytest.mark.parametrize("seconds", [0, float("nan")])
def test_no_time_to_wait_asks_once(seconds: float) -> None:
    machine = Machine(1)
    with pytest.raises(errors.PathInUseError):
        machine.until_free(seconds)
    assert machine.asked == 1


def test_wait_that_is_over_raises_last_refusal() -> None:
    machine = Machine(61)
    with pytest.raises(errors.PathInUseError):
        machine.until_free(60)
    assert machine.now == 60


def test_other_refusal_is_not_asked_again() -> None:
    machine = Machine(1, errors.VolumeError("there is no such volume"))
    with pytest.raises(errors.VolumeError):
        machine.until_free(60)
    assert machine.asked == 1


def test_session_that_has_begun_is_not_asked_again() -> None:
    machine = Machine(1)
    with pytest.raises(errors.PathInUseError):
        machine.until_free(60, again=False)
    assert machine.asked == 1
