"""No agent runs on a runsc that does not apply the filter; one that does is asked once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from policy import errors
from sandbox.storage import json_cache
from tests.kernel.world import HEAD, TAIL, World

GOOD = {"main.py": HEAD + "answer = 1" + TAIL}


def _wrapper(place: Path, body: str) -> Path:
    """A runsc of root's own that is not quite one."""
    place.mkdir(mode=0o755)
    fake = place / "runsc"
    fake.write_text(f"#!/bin/sh\n{body}\n")
    fake.chmod(0o755)
    return fake


DROPS_THE_FILTER = 'for a; do shift; [ "$a" = --oci-seccomp=true ] || set -- "$@" "$a"; done\nexec /usr/bin/runsc "$@"'


def test_runsc_that_drops_filter_runs_nothing(world: World) -> None:
    fake = _wrapper(Path("/usr/local/lib") / f"covenant-test-{os.getpid()}", DROPS_THE_FILTER)
    try:
        world.configure(runsc=str(fake))
        with pytest.raises(errors.NotEnforceableError, match="cannot hold an agent"):
            world.run(world.sign(world.package(GOOD)))
        rows = [row["kind"] for row in world.rows()]
        assert [row.get("state", row["type"]) for row in rows] == [
            *("Provisioned", "Validated", "self_test_started", "self_test", "Rejected", "manifest_rejected"),
        ]
        assert rows[3]["passed"] is False
        # The control: the same package with the real one.
        world.configure(runsc="/usr/bin/runsc")
        assert world.run(world.sign(world.package(GOOD))).error is None
    finally:
        fake.unlink()
        fake.parent.rmdir()


def test_proof_is_made_once_and_again_when_anything_of_it_changes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The caller names no directory from which to start a program: TMPDIR is not used.
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/directory")
    record = world.state / "closures" / "self-test.json"
    record.unlink(missing_ok=True)
    path = world.sign(world.package(GOOD))
    for _ in range(2):
        assert world.run(path).error is None
    assert _proofs(world) == 1
    held = json_cache.read(record)
    assert held is not None
    for number, other in enumerate(({"kernel": "another"}, {"code": "another"})):
        json_cache.write(record, {**held, **other})
        assert world.run(path).error is None
        assert _proofs(world) == 2 + number


def _proofs(world: World) -> int:
    return sum(row["kind"]["type"] == "self_test" and row["kind"]["passed"] for row in world.rows())
