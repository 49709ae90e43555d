"""Each refusal of a run is one row with one id, and the line that ``covenant denials`` names makes the same probe pass.

Under real runsc, with a network on an internet of the test's own. The agent is asked everything in one run; the control
is the same package with the named lines, in which the same probes succeed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.denials import Denial
from tests import cli_kit
from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.world import HEAD, TAIL, World, refused

FILL = "block = bytearray(400 << 20)\nfor i in range(0, len(block), 4096): block[i] = 1\nanswer = 1\n"
BUSY = "import time\ntime.sleep(60)\nanswer = 1\n"


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    with internet.made() as made:
        yield made


@pytest.fixture
def networked(tmp_path: Path, warm: Path, net: Internet) -> Iterator[NetworkedWorld]:
    yield internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    assert net.leftovers() == []


def denied(world: World, run_id: str) -> list[dict[str, Any]]:
    """The rows of a run's denials."""
    kinds = [row["kind"] for row in world.rows()]
    return [kind for kind in kinds if kind["type"] == "denied" and kind["run_id"] == run_id]


def explained(world: World, subject: str | Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``covenant denials`` says, by the target of each."""
    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    found = cli_kit.document("denials", subject)
    return {one["target"]: one for one in found["denials"]}


def added(one: dict[str, Any], table: str) -> Any:
    """What the named lines write into a table of the manifest."""
    return tomllib.loads("\n".join(one["add"]))[table]


def test_memory_is_one_denial_and_its_line_mends_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = world.run_code(HEAD + FILL + TAIL, memory_mb=256)
    refused(errors.OutOfMemoryError, answer.error)
    (row,) = denied(world, answer.run_id)
    expected = Denial("memory", "memory_mb", "out_of_memory")
    assert (row["denial"], row["layer"], row["target"], row["code"]) == (
        expected.id,
        "memory",
        "memory_mb",
        expected.code,
    )
    assert (row["grant"], row["count"]) == ("resources.memory_mb", 1)
    assert [one.denial for one in answer.denials] == [expected]
    # Before the run's last row, so that whoever follows the log has all of a run when it ends.
    assert world.rows()[-1]["kind"]["type"] == "run_ended"
    one = explained(world, world.base / "packages" / "probe", monkeypatch)["memory_mb"]
    assert added(one, "resources") == {"memory_mb": 512}
    assert world.ask(FILL, memory_mb=512) == 1


def test_a_deadline_is_one_denial_and_names_its_clock(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = world.run_code(HEAD + BUSY + TAIL, cpu_ms=700)
    refused(errors.DeadlineError, answer.error)
    (row,) = denied(world, answer.run_id)
    assert row["denial"] == Denial("time", "cpu_ms_per_task", "deadline").id
    one = explained(world, answer.run_id[:8], monkeypatch)["cpu_ms_per_task"]
    assert added(one, "resources") == {"cpu_ms_per_task": 1400}
    assert world.ask(BUSY.replace("60", "1"), cpu_ms=20_000) == 1
    answer = world.run_code(HEAD + BUSY + TAIL, request={"timeout_ms": 700})
    (row,) = denied(world, answer.run_id)
    assert (row["target"], row["grant"]) == ("timeout", None)
    one = explained(world, answer.run_id, monkeypatch)["timeout"]
    assert one["add"] == []
    assert "--timeout" in one["note"]


def test_a_run_in_which_nothing_was_refused_has_no_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = world.run_code(HEAD + "answer = 1" + TAIL)
    assert (answer.denials, denied(world, answer.run_id)) == ((), [])
    assert explained(world, answer.run_id, monkeypatch) == {}
