"""A run that writes is alone with it among the live runs, until its holder has ended and is cleared away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from policy import errors
from policy.rules.writers import WrittenPlace
from sandbox.rundir import directory
from sandbox.rundir.label import SELF_TEST
from tests.unit.sandbox.rundir.test_admission import ISSUER, admitted, claim

DATA = WrittenPlace("device 7", "/srv/data")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@contextlib.contextmanager
def writing(runs: Path, run_id: str, place: WrittenPlace = DATA, caller: str = "") -> Iterator[None]:
    with admitted(runs, run_id, structs.replace(claim(None), writes=(place,), caller=caller, most=9)):
        yield


def test_second_writer_waits_for_the_first(runs: Path) -> None:
    with writing(runs, "first"), pytest.raises(errors.PathInUseError, match="run `first`"), writing(runs, "second"):
        pass
    with writing(runs, "second"):
        pass


def test_shared_place_has_several_writers(runs: Path) -> None:
    shared = structs.replace(DATA, shared=True)
    alone = structs.replace(claim(None), writes=(DATA,))
    with writing(runs, "first", shared), writing(runs, "second", shared), pytest.raises(errors.PathInUseError):
        alone.settle(runs)


def test_other_callers_run_is_not_named(runs: Path) -> None:
    asked = structs.replace(claim(None), writes=(DATA,), caller="uid1001@host", most=9)
    with writing(runs, "first", caller="uid1000@host"), pytest.raises(errors.PathInUseError) as e:
        asked.settle(runs)
    assert "another run" in e.value.message
    assert "first" not in str(e.value)


def test_self_test_holds_nothing(runs: Path) -> None:
    label = structs.replace(claim(None), writes=(DATA,)).label(issuer=ISSUER, operator=None, signers=(), now_ms=1)
    with directory.RunDirectory(runs / "test", {**label, SELF_TEST: "yes"}), writing(runs, "second"):
        pass


def test_killed_writer_holds_until_cleared(runs: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with writing(runs, "first"):
            os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    with pytest.raises(errors.PathInUseError, match="was killed") as e, writing(runs, "second"):
        pass
    assert e.value.hint == "run it again"
    with directory.abandoned(runs) as left:
        for path in left:
            directory.remove(path)
    with writing(runs, "second"):
        pass
