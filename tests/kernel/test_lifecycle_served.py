"""The verbs about runs over a supervisor's socket, on a tree, on a terminal, and as docs/lifecycle.md shows them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from covenant.cli.main import cli
from covenant.cli.run import manage
from sandbox.kernel.cgroup import cgroup
from sandbox.rundir import registry
from tests.kernel import serving
from tests.kernel.conftest import leftovers
from tests.kernel.families import member, spawn
from tests.kernel.live_runs import until
from tests.kernel.serving import CALLER, Served, asked, covenant
from tests.kernel.test_lifecycle import COUNTS
from tests.kernel.world import ROOT, World

PAGE = ROOT / "docs" / "lifecycle.md"
BIG: dict[str, Any] = {"memory_mb": 1024, "resources": "pids_max = 256\ncpu_millis = 2000\n"}
SMALL: dict[str, Any] = {"memory_mb": 64, "resources": "pids_max = 16\ncpu_millis = 100\n"}


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm), agents=[str(base / "packages")]) as made:
        yield made
        made.quiet()
        assert leftovers(made.world) == []


def _ended(world: World) -> dict[str, str]:
    """By run id, the code that each run ended with."""
    rows = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    return {row["run_id"]: row["code"] for row in rows}


def entries(world: World) -> list[registry.Entry]:
    return [one for one in registry.live(world.state / "runs") if one.state == "Running"]


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_caller_sees_and_ends_what_it_asked_for_and_nothing_else(served: Served) -> None:
    world = served.world
    package = world.sign(world.package({"main.py": COUNTS}, name="counts", id="counts", cpu_ms=250_000))
    own = subprocess.Popen(
        serving.covenant_command("run", str(package), "hi"),
        env=serving.environment_of(served, CALLER),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **serving.identity(CALLER),
    )
    with asked(served.path, package):
        until(lambda: [one.state for one in entries(world)] == ["Running"] * 2)
        runs = {one.issuer["display"]: one.run_id for one in entries(world)}
        mine, others = runs.pop(f"uid{CALLER}@local"), runs.pop("operator@local")
        assert [run["run_id"] for run in said(covenant("ps", "--json", served=served, uid=CALLER))["runs"]] == [mine]
        both = said(covenant("ps", "--json", served=served))["runs"]
        assert sorted(run["run_id"] for run in both) == sorted([mine, others])
        # What is another's is not there, by whichever verb.
        for verb in ("suspend", "resume", "kill", "logs"):
            assert said(covenant(verb, others, "--json", served=served, uid=CALLER))["code"] == "no_such_run", verb
        # Its own: stopped, let go, followed by its log, ended, and waited for.
        assert said(covenant("suspend", mine, "--json", served=served, uid=CALLER))["runs"] == [mine]
        assert said(covenant("resume", mine[:8], "--json", served=served, uid=CALLER))["runs"] == [mine]
        until(lambda: "1\n2\n3\n" in covenant("logs", mine, served=served, uid=CALLER).stdout)
        follower = subprocess.Popen(
            serving.covenant_command("logs", mine, "--follow"),
            env=serving.environment_of(served, CALLER),
            stdout=subprocess.PIPE,
            text=True,
            **serving.identity(CALLER),
        )
        assert said(covenant("kill", mine, "--reason", "mine", "--json", served=served, uid=CALLER))["runs"] == [mine]
        followed, _ = follower.communicate(timeout=60)
        lines = [int(line) for line in followed.split()]
        assert lines[:3] == [1, 2, 3]
        assert follower.returncode == 0
        assert own.wait(60) == 1
        # It has ended, and tells only its own caller, also later.
        assert said(covenant("wait", mine, "--json", served=served, uid=CALLER))["code"] == "stopped"
        assert said(covenant("wait", others[:7], "--json", served=served, uid=CALLER))["code"] == "no_such_run"
        reasons = [
            row["kind"]["reason"]
            for row in world.rows()
            if row["kind"].get("run_id") == mine and "reason" in row["kind"]
        ]
        assert f"stopped by uid{CALLER}@local: mine" in reasons
        assert [one.run_id for one in entries(world)] == [others]
    until(lambda: not entries(world))


def test_verbs_take_package_of_a_run(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    world = served.world
    package = world.sign(world.package({"main.py": COUNTS}, name="named", id="named", cpu_ms=250_000))
    with asked(served.path, package):
        until(lambda: len(entries(world)) == 1)
        (run,) = (one.run_id for one in entries(world))
        until(lambda: "1\n2\n3\n" in covenant("logs", str(package), served=served).stdout)
        attested = covenant("attest", str(package), served=served)
        assert attested.returncode == 0, attested.stderr
        assert run in attested.stdout
        # A run that has ended is no live run of the package: end it once `wait` has found it.
        found = threading.Event()
        look = manage.of_package

        def looked(word: str, *, ended: bool = False) -> str:
            try:
                return look(word, ended=ended)
            finally:
                found.set()

        monkeypatch.setattr(manage, "of_package", looked)
        for name, value in serving.environment_of(served, 0).items():
            monkeypatch.setenv(name, value)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(CliRunner().invoke, cli, ["wait", str(package), "--json"])
            assert found.wait(60)
            assert said(covenant("kill", run, "--json", served=served))["runs"] == [run]
            answer = waiting.result(120)
        assert (document := json.loads(answer.stdout))["code"] == "stopped", document
        assert document["run_id"] == run
    until(lambda: not entries(world))
    # Its log is there after the end; a live run is not.
    assert "1\n2\n3\n" in covenant("logs", str(package), served=served).stdout
    for verb in ("wait", "attest"):
        assert said(covenant(verb, str(package), "--json", served=served))["code"] == "no_such_run", verb


TREE = """\
asked = [send("spawn", agent=name, text="") for name in ("one", "two")]
[hear(each) for each in asked]
print("ready", file=sys.stderr, flush=True)
import time
time.sleep(600)
"""


def test_tree_is_stopped_let_go_and_ended_as_one_and_shown_on_terminal(served: Served) -> None:
    world = served.world
    for name in ("one", "two"):
        member(world, name, "import time\ntime.sleep(600)", more=spawn(1, 1), **SMALL)
    top = member(world, "top", TREE, more=spawn(), **BIG)
    with asked(served.path, top, detach=True):
        until(lambda: len(entries(world)) == 3)
        tree = said(covenant("ps", "--json", served=served))["runs"]
        assert (tree[0]["agent_id"], tree[0]["depth"]) == ("top", 0)
        assert {run["agent_id"]: run["parent"] for run in tree[1:]} == dict.fromkeys(("one", "two"), tree[0]["run_id"])
        ids, run_id = {run["run_id"] for run in tree}, tree[0]["run_id"]
        shown = covenant("ps", "--tree", served=served).stdout.splitlines()
        assert re.fullmatch(r"RUN +STATE +AGE +PARENT +BY +AGENT", shown[0])
        column = shown[0].index("AGENT")
        assert [line[column:] for line in shown[1:]] == [run["agent_id"].rjust(3 + 2 * run["depth"]) for run in tree]
        by = shown[0].index("BY")
        assert [line[by:column].strip() for line in shown[1:]] == ["operator@local", *[f"top@{run_id[:8]}"] * 2]
        assert set(said(covenant("suspend", run_id, "--tree", "--json", served=served))["runs"]) == ids
        hierarchies = cgroup.Hierarchies.read()
        for one in registry.live(world.state / "runs"):
            leaf = cgroup.Leaf(hierarchies, one.run_id)
            leaf.adopt(one.cgroups)
            assert leaf.frozen()
        assert _watched(served, "Suspended") >= 2
        assert set(said(covenant("resume", run_id, "--tree", "--json", served=served))["runs"]) == ids
        assert len(entries(world)) == 3
        assert set(said(covenant("kill", run_id, "--tree", "--json", served=served))["runs"]) == ids
        assert registry.live(world.state / "runs") == []
    # The last row of one comes after its directory is gone, which is what a kill waits for.
    until(lambda: ids <= _ended(world).keys())
    ended = _ended(world)
    # A child ends with its parent or by the same wish, whichever came first.
    assert ended[run_id] == "stopped"
    assert {ended[one] for one in ids} <= {"stopped", "parent_ended"}


BROOD = """while True:
    send("spawn", agent="clings", text="")
    time.sleep(0.05)
"""


def test_tree_that_never_stops_growing_is_ended_with_what_would_outlive_its_parent(served: Served) -> None:
    """The closest attack on `kill --tree`: children that outlive their parent, asked for until its last moment."""
    world = served.world
    member(world, "clings", "import time\ntime.sleep(600)", more=spawn(1, 1, "adopt"), **SMALL)
    path = member(world, "brood", "import time\n" + BROOD, more=spawn(2, 4, "adopt"), **BIG)
    with asked(served.path, path, detach=True):
        until(lambda: len(entries(world)) >= 3)
        (top,) = [one.run_id for one in entries(world) if one.agent_id == "brood"]
        # The control: without --tree they do outlive it.
        killed = said(covenant("kill", top, "--json", served=served))
        assert killed == {"kind": "kill", "runs": [top]}
        orphans = [one for one in registry.live(world.state / "runs") if top in one.ancestors]
        assert len(orphans) >= 2
        # One that was just being started may be seen later than its parent's end.
        while orphans:
            for one in orphans:
                assert said(covenant("kill", one.run_id, "--json", served=served))["runs"] == [one.run_id]
            orphans = [one for one in registry.live(world.state / "runs") if top in one.ancestors]
    with asked(served.path, path, detach=True):
        until(lambda: len(entries(world)) >= 3)
        (top,) = [one.run_id for one in entries(world) if one.agent_id == "brood"]
        ended = said(covenant("kill", top, "--tree", "--json", served=served))["runs"]
        assert registry.live(world.state / "runs") == []
        assert len(ended) >= 3
    served.quiet()
    assert registry.live(world.state / "runs") == []


def _watched(served: Served, word: str) -> int:
    """How many times `ps --watch` has shown the table on a terminal when it was interrupted."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            command = serving.covenant_command("ps", "--watch")
            os.execve(command[0], command, {**serving.environment_of(served, 0), "COLUMNS": "80", "LINES": "24"})
        finally:
            os._exit(127)
    screen = b""
    while screen.count(b"\x1b[H") < 3:
        assert select.select([terminal], [], [], 60)[0], screen
        screen += os.read(terminal, 65536)
    os.kill(pid, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    frames = screen.split(b"\x1b[H\x1b[J")
    assert all(len(line) <= 80 for frame in frames for line in frame.decode().split("\r\n"))
    return sum(word.encode() in frame for frame in frames)


def test_without_terminal_there_is_nothing_to_watch(served: Served) -> None:
    done = covenant("ps", "--watch", served=served)
    assert done.returncode == 2
    assert "--watch is for a terminal" in done.stderr


def test_page_says_what_verbs_do(served: Served) -> None:
    """Each command of docs/lifecycle.md, in its order, on a run that is live."""
    world = served.world
    package = world.sign(world.package({"main.py": COUNTS}, name="counts", id="counts", cpu_ms=250_000))
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line.partition("#")[0].replace('"why"', "why").split() for line in block.strip().splitlines()]
    assert [line[1] for line in lines] == ["ps", "suspend", "resume", "kill", "logs", "wait"]
    with asked(served.path, package, detach=True):
        until(lambda: entries(world))
        run_id = entries(world)[0].run_id
        status = {}
        for line in lines:
            done = covenant(*(run_id if word == "RUN" else word for word in line[1:]), served=served)
            status[line[1]] = done.returncode, done.stdout
        assert {verb: code for verb, (code, _) in status.items()} == {
            **dict.fromkeys(("ps", "suspend", "resume", "kill", "logs"), 0),
            "wait": 1,
        }
        assert run_id[:8] in status["ps"][1]
        assert status["kill"][1] == f"ended {run_id}\n"
