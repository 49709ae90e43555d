"""Attacks on everything between a verified package and the kernel: by an agent, by an ordinary user of the host, by
a package's author, by a crash at a bad moment. Each beside its positive control.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from tests.kernel.conftest import leftovers
from tests.kernel.world import HEAD, ROOT, TAIL, World, refused

LOCAL: dict[str, Any] = {"backend": "trusted-local", "required": "false"}


def sleeper(seconds: float) -> str:
    return f"{HEAD}import time\ntime.sleep({seconds})\nanswer = 1{TAIL}"


def covenant(world: World, package: Path, *before: str, **how: Any) -> subprocess.Popen[bytes]:
    """`covenant run` as a process of its own, in a process group of its own as a shell would start it."""
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [*before, sys.executable, "-m", "covenant", "run", str(package), "hi", "--json"]
    return subprocess.Popen(
        command, env=environment, process_group=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how
    )


def ends(world: World) -> list[dict[str, Any]]:
    return [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]


def wait(until: Callable[[], object], seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < limit
        time.sleep(0.02)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(params=["linux-gvisor", "trusted-local"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return LOCAL if request.param == "trusted-local" else {}


# --- the terminal of an ordinary user under sudo ------------------------------------------------------------


def test_the_terminal_cannot_stop_the_clock(world: World, backend: dict[str, Any]) -> None:
    control = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    package = world.sign(world.package({"main.py": sleeper(60)}, cpu_ms=2000, **backend))
    process = covenant(world, package)
    wait(lambda: list((world.state / "runs").glob("*/label.json")))
    time.sleep(0.7)
    for stopped in (control, process):
        stopped.send_signal(signal.SIGTSTP)
    wait(lambda: state_of(control.pid) == "T")
    control.kill()
    control.wait()
    out, err = process.communicate(timeout=20)
    assert b'"deadline"' in out, (out, err)
    assert ends(world)[-1]["code"] == "deadline"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
def test_whatever_ends_the_supervisor_ends_the_run_with_a_row(
    world: World, backend: dict[str, Any], number: signal.Signals
) -> None:
    package = world.sign(world.package({"main.py": sleeper(60)}, cpu_ms=60000, **backend))
    process = covenant(world, package)
    wait(lambda: list((world.state / "runs").glob("*/label.json")))
    time.sleep(0.5)
    assert ends(world) == []
    process.send_signal(number)
    time.sleep(0.01)
    process.send_signal(number)  # a second one must not cut the clean-up short
    process.communicate(timeout=20)
    assert [row["code"] for row in ends(world)] == ["interrupted"]
    assert leftovers(world) == []


def test_a_run_whose_supervisor_was_killed_has_its_last_row_at_the_next_start(
    world: World, backend: dict[str, Any]
) -> None:
    package = world.sign(world.package({"main.py": sleeper(60)}, cpu_ms=60000, **backend))
    process = covenant(world, package)
    wait(lambda: list((world.state / "runs").glob("*/label.json")))
    time.sleep(0.5)
    process.kill()
    process.communicate()
    assert ends(world) == []
    quick = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}, name="next", id="next"))
    assert world.run(quick).error is None
    started = [row["kind"]["run_id"] for row in world.rows() if row["kind"]["type"] == "run_started"]
    assert [(row["run_id"], row["agent_id"], row["code"]) for row in ends(world)] == [
        (started[0], "probe", "cut_off"),
        (started[1], "next", None),
    ]


def test_closed_descriptors_of_the_caller_do_not_become_the_logs(world: World, backend: dict[str, Any]) -> None:
    package = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}, **backend))
    process = covenant(world, package, "/bin/sh", "-c", '"$@" <&- >&- 2>&-', "sh")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert [row["status"] for row in ends(world)] == ["ok"]
    assert verified(world)


def test_a_caller_that_ignores_its_children_does_not_hide_how_the_agent_ended(
    world: World, backend: dict[str, Any]
) -> None:
    package = world.sign(world.package({"main.py": HEAD + 'print(\'{"text": ""}\')\nsys.exit(3)'}, **backend))
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = covenant(world, package, sys.executable, "-c", ignoring)
    out, err = process.communicate(timeout=60)
    assert b'"agent_failed"' in out, (out, err)
    assert ends(world)[-1]["exit_status"] == 3


def verified(world: World) -> bool:
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", "audit", "verify"]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


# --- what the log says ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "row"), [(3, (3, None)), (200, (200, None)), (255, (255, None)), (137, (None, 9))])
def test_an_exit_status_that_no_signal_has_is_not_logged_as_one(
    world: World, backend: dict[str, Any], status: int, row: tuple[int | None, int | None]
) -> None:
    answer = world.run_code(HEAD + f"os._exit({status})", **backend)
    refused(errors.AgentFailedError, answer.error)
    assert (ends(world)[-1]["exit_status"], ends(world)[-1]["exit_signal"]) == row


def test_a_live_trusted_local_run_holds_its_agents_id(world: World) -> None:
    """Rule 8 for the backend that has no sandbox: two packages of one id are never live at once."""
    package = world.sign(world.package({"main.py": sleeper(4)}, **LOCAL))
    other = world.sign(world.package({"main.py": HEAD + "answer = 2" + TAIL}, name="other"))
    process = covenant(world, package)
    wait(lambda: list((world.state / "runs").glob("*/label.json")))
    with pytest.raises(errors.CovenantError) as refusal:
        world.run(other)
    assert refusal.value.code == "rule_8_identity", refusal.value
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert world.run(other).error is None
