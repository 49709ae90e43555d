"""A clock that was ahead once, for every process of the command: case 12, with a clock that only they see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kernel.conftest import leftovers
from tests.kernel.world import HEAD, TAIL, World
from tests.year.clock import DAY_MS, Clock
from tests.year.machine import Place

_COMMAND = (sys.executable, "-c", "from covenant.cli.main import entry; entry()")
AHEAD_MS = 60 * DAY_MS


class _Operator:
    """Runs the command under a clock that the test moves."""

    def __init__(self, world: World, clock: Clock) -> None:
        self.clock = clock
        self._environment = {**os.environ, **clock.environment, "COVENANT_HOME": str(world.home)}

    def call(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [*_COMMAND, *map(str, words)]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=300, check=False)

    def done(self, *words: str | Path) -> str:
        made = self.call(*words)
        assert made.returncode == 0, made.stdout + made.stderr
        return made.stdout


def test_state_clock_mends_a_forward_step(warm: Path, tmp_path: Path) -> None:
    (tmp_path / "clock").mkdir()
    world = Place(tmp_path, warm=warm)
    world.configure()
    operator = _Operator(world, Clock(tmp_path / "clock"))
    package = world.package({"main.py": HEAD + "answer = 'ran'\n" + TAIL})
    operator.done("keys", "new", "ann", "--no-passphrase")
    operator.done("trust", "init", "--key", "ann", "--expires", "400d")

    def sign() -> None:
        operator.done("manifest", "sign", package, "--key", "ann", "--fresh", "--expires", "30d")

    sign()
    assert "ran" in operator.done("run", package, "x")
    operator.clock.move(AHEAD_MS)
    sign()
    assert "ran" in operator.done("run", package, "x")
    operator.clock.move(-AHEAD_MS)
    sign()
    refused = operator.call("run", package, "x", "--json")
    assert refused.returncode != 0
    assert "covenant state clock" in refused.stdout + refused.stderr, refused
    found = {one["name"]: one for one in json.loads(operator.call("doctor", "--json").stdout)["checks"]}
    assert "covenant state clock" in json.dumps(found["clock"])
    # The fix that both name.
    operator.done("state", "clock", "--yes")
    sign()
    assert "ran" in operator.done("run", package, "x")
    assert [row["kind"]["type"] for row in world.rows()].count("clock_set") == 1
    assert operator.call("audit", "verify").returncode == 0
    assert leftovers(world) == []
