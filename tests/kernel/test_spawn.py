"""Agents that start agents: a child's rights, rights that it can never have, and the remains when its parent ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.rundir import registry
from sandbox.shim import control_socket
from tests.kernel.conftest import leftovers
from tests.kernel.families import BIG, SMALL, answered, member, reads, spawn
from tests.kernel.live_runs import until
from tests.kernel.test_attacks_sandbox import covenant
from tests.kernel.test_command_line import call, document
from tests.kernel.world import HEAD, TAIL, World

# What an agent can read of the places that the tests make, one file in each.
LOOK = """
def look():
    return sorted(name for name in ("red", "green", "blue") if os.path.exists(f"{intent['text']}/{name}/secret"))
"""


@pytest.fixture(scope="module")
def family_world(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[World]:
    """One world for all that needs none of its own."""
    made = World(tmp_path_factory.mktemp("family"), warm=warm)
    yield made
    assert leftovers(made) == []


def of(world: World, kind: str, **fields: Any) -> list[dict[str, Any]]:
    rows = (row["kind"] for row in world.rows())
    return [row for row in rows if row["type"] == kind and all(row[name] == value for name, value in fields.items())]


def entries(world: World) -> list[registry.Entry]:
    return registry.live(world.state / "runs")


# --- three levels, each with less ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places() -> Iterator[Path]:
    # Not below /tmp, where each of these agents has scratch of its own.
    base = Path(tempfile.mkdtemp(prefix="covenant-test-", dir="/srv"))
    base.chmod(0o755)
    for name in ("red", "green", "blue"):
        (base / name).mkdir(mode=0o755)
        (base / name / "secret").write_text(name)
    yield base
    shutil.rmtree(base)


def test_grandchild_never_reads_what_its_grandparent_lost(family_world: World, places: Path) -> None:
    """Four levels, and each manifest grants all three places but for one that lost one: none below has it again."""
    world, every = family_world, [str(places / name) for name in ("red", "green", "blue")]
    go = LOOK + "answer = [look(), child('NEXT', intent['text'], on_excess='narrow')]"
    medium = {"memory_mb": 1024, "resources": "pids_max = 256\ncpu_millis = 1000\n"}
    little = {"memory_mb": 512, "resources": "pids_max = 128\ncpu_millis = 500\n"}
    top = member(world, "top", go.replace("NEXT", "second"), more=reads(*every) + spawn(), **BIG)
    member(world, "second", go.replace("NEXT", "third"), more=reads(*every[:2]) + spawn(), **medium)
    member(world, "third", go.replace("NEXT", "fourth"), more=reads(*every) + spawn(), **little)
    fourth = member(
        world,
        "fourth",
        LOOK + "answer = [look(), child('third') if _answers else None]",
        more=reads(*every) + spawn(),
        **SMALL,
    )

    first_saw, second = answered(world, top, str(places))
    second_saw, third = json.loads(second["ok"]["text"])
    third_saw, fourth_said = json.loads(third["ok"]["text"])
    assert "ok" in fourth_said, fourth_said
    fourth_saw, fifth = json.loads(fourth_said["ok"]["text"])
    assert (first_saw, second_saw, third_saw) == (["blue", "green", "red"], ["green", "red"], ["green", "red"])
    assert fourth_saw == ["green", "red"]
    # Three levels below the top, and no further: the last has no broker to ask.
    assert fifth is None
    # The control: the same package, started by its operator, reads all three.
    assert answered(world, fourth, str(places))[0] == ["blue", "green", "red"]

    started = {row["agent_id"]: row for row in of(world, "run_started")[:4]}
    assert len({row["policy_digest"] for row in started.values()}) == 4
    above = [started[name]["run_id"] for name in ("top", "second", "third")]
    assert [started[name]["parent"] for name in ("top", "second", "third", "fourth")] == [None, *above]
    assert {row["operator"] for row in started.values()} == {"tester"}
    issuers = {
        row["kind"]["agent_id"]: row["issuer"]["display"] for row in world.rows()[::-1] if "agent_id" in row["kind"]
    }
    assert issuers["third"] == f"second@{above[1]}"


def test_what_exceeds_parent_is_refused_and_says_what(family_world: World, places: Path) -> None:
    world = family_world
    more = reads(str(places / "red"), str(places / "blue"))
    member(world, "greedy", "answer = 1", more=more, **SMALL)
    code = "answer = [child('greedy'), child('greedy', on_excess='narrow')]"
    refused, narrowed = answered(world, member(world, "poor", code, more=reads(str(places / "red")) + spawn(), **BIG))
    assert refused["error"]["code"] == "rule_4_parent"
    columns = refused["error"]["domains"]["filesystem"]
    blue = f"read {places / 'blue'}"
    assert (blue in columns["requested"], blue in columns["granted"], blue in columns["removed"]) == (True, False, True)
    assert narrowed["ok"]["text"] == "1"
    denied = of(world, "denied", layer="spawn", target="greedy")
    assert [row["code"] for row in denied] == ["rule_4_parent"]


def test_child_is_what_its_own_manifest_says(family_world: World) -> None:
    """Its intent names who asks, it has no descriptor that it was not granted, and its clock is its parent's."""
    world = family_world
    code = """
    import os
    answer = [intent["issuer"]["display"], intent["parent"] is not None, sorted(os.listdir("/proc/self/fd"))]
    """
    member(world, "plain", code, cpu_ms=3_600_000, **SMALL)
    top = member(world, "asks", "answer = [child('plain', on_excess='narrow') for _ in range(2)]", more=spawn(), **BIG)
    first, second = answered(world, top)
    asking = of(world, "run_started", agent_id="asks")[-1]["run_id"]
    for one in (first, second):
        display, has_parent, fds = json.loads(one["ok"]["text"])
        assert (display, has_parent) == (f"asks@{asking}", True)
        # 3 is the directory that is being listed, and not a broker.
        assert fds == ["0", "1", "2", "3"]
    clocks = [row["deadline_clock"] for row in of(world, "run_started", agent_id="plain")]
    assert set(clocks) == {"parent"}


def test_broker_is_there_exactly_where_something_is_granted_that_it_is_for(family_world: World) -> None:
    look = """
    import json, os, stat
    input()
    found = []
    for fd in range(3, 12):
        try: found.append([fd, stat.S_ISSOCK(os.fstat(fd).st_mode)])
        except OSError: pass
    print(json.dumps({"text": json.dumps(found)}))
    """
    found = []
    for more in ("", spawn()):
        path = family_world.package({"main.py": textwrap.dedent(look)}, name="looks", id="looks", more=more)
        found.append(answered(family_world, family_world.sign(path)))
    assert found == [[], [[3, True]]]


def test_agent_hands_on_only_what_its_own_caller_had_to_hold(family_world: World) -> None:
    world = family_world
    needs = '[capabilities]\nrequired = ["memory.read"]\n'
    member(world, "skilled", "answer = 1", more=needs, **SMALL)
    without = answered(world, member(world, "lay", "answer = child('skilled')", more=spawn(), **BIG))
    with_it = answered(world, member(world, "master", "answer = child('skilled')", more=needs + spawn(), **BIG))
    assert (without["error"]["code"], with_it["ok"]["text"]) == ("capability_missing", "1")
    checks = of(world, "capability_check", agent_id="skilled")
    assert [(row["passed"], row["missing_actions"]) for row in checks] == [(False, ["memory.read"]), (True, [])]


def test_agent_of_node_has_same_broker(family_world: World) -> None:
    world, node = family_world, {"runtime": "node", "entry": "main.js"}
    # Of its own runtime: one of another calls what its parent may not.
    leaf = {"main.js": "console.log(JSON.stringify({text: '1'}))"}
    world.sign(world.package(leaf, name="node-leaf", id="node-leaf", **{**SMALL, **node, "memory_mb": 256}))
    code = """
    const fs = require("fs");
    let heard = "";
    function answer(request) {
      fs.writeSync(3, JSON.stringify(request) + "\\n");
      const piece = Buffer.alloc(65536);
      while (!heard.includes("\\n")) heard += piece.toString("utf8", 0, fs.readSync(3, piece));
      const [line, ...rest] = heard.split("\\n");
      heard = rest.join("\\n");
      return JSON.parse(line);
    }
    const said = answer({id: 1, kind: "spawn", agent: "node-leaf", text: ""});
    const result = said.ok ? answer({id: 2, kind: "wait", run: said.ok.run}) : said;
    console.log(JSON.stringify({text: JSON.stringify(result)}));
    """
    files = {"main.js": textwrap.dedent(code)}
    path = world.sign(world.package(files, name="noded", id="noded", more=spawn(), **BIG, **node))
    said = answered(world, path)
    assert said.get("ok", said)["text"] == "1"


# --- the budget ---------------------------------------------------------------------------------------------------


def test_many_at_once_never_exceed_budget(world: World) -> None:
    """Two hundred ask through one broker at once for four places."""
    member(world, "leaf", "import time\ntime.sleep(600)", **SMALL)
    code = """
    asked = [send("spawn", agent="leaf", text="") for _ in range(200)]
    answer = [hear(one) for one in asked]
    """
    path = member(world, "crowd", code, more=spawn(number=4), **BIG)
    seen, process = set(), covenant(world, path)
    while process.poll() is None:
        live = [one for one in entries(world) if one.agent_id == "leaf"]
        seen.add(len(live))
        time.sleep(0.02)
    out, err = process.communicate()
    answers = json.loads(json.loads(out)["text"])
    codes = [one["error"]["code"] for one in answers if "error" in one]
    assert sum("ok" in one for one in answers) == 4, (answers, err)
    assert set(codes) == {"rule_5_spawn_budget"}
    assert max(seen) == 4
    assert len(of(world, "run_ended", agent_id="leaf", code="parent_ended")) == 4


def test_sums_are_parents_and_place_is_free_again(family_world: World) -> None:
    world = family_world
    member(world, "half", "answer = 1", memory_mb=256, resources="pids_max = 16\ncpu_millis = 100\n")
    code = """
    held = [ask("spawn", agent="half", text="") for _ in range(2)]
    answer = [["ok" in one for one in held], [ask("wait", run=one["ok"]["run"]) for one in held if "ok" in one]]
    answer.append(child("half"))
    """
    path = member(world, "sums", code, more=spawn(), memory_mb=400, resources="pids_max = 64\ncpu_millis = 1000\n")
    admitted, results, again = answered(world, path)
    assert (admitted, [one["ok"]["text"] for one in results], again["ok"]["text"]) == ([True, False], ["1"], "1")
    refusal = of(world, "manifest_rejected", agent_id="half")[-1]
    assert (refusal["rule"], refusal["grant"]) == (5, "resources.memory_mb")


# --- the parent's end ---------------------------------------------------------------------------------------------

WAITS = """
import signal, sys, time
def told(number, frame):
    time.sleep(0.3)
    sys.stderr.write("told")
    sys.exit(7)
signal.signal(signal.SIGTERM, told)
sys.stderr.write("ready ")
sys.stderr.flush()
while not os.path.exists(intent["text"]): time.sleep(0.05)
answer = 1
"""
FATES = ("terminate", "wind-down", "adopt")


@contextlib.contextmanager
def parent_of_three(
    world: World, places: Path, tail: str
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, registry.Entry]]]:
    """A run with a child of each fate; the one that goes on does so until there is a file `on` among the red."""
    world.configure(grace_seconds=10)
    red, on = reads(str(places / "red")), places / "red" / "on"
    on.unlink(missing_ok=True)
    for fate in FATES:
        member(world, fate, WAITS, more=red + spawn(1, 1, fate), **SMALL)
    code = f"asked = [send('spawn', agent=name, text={str(on)!r}) for name in {FATES}]\n"
    # One that is refused ends the run, which then says why.
    code += f"for one in asked:\n    heard = hear(one)\n    assert 'ok' in heard, heard\n{tail}"
    process = covenant(world, member(world, "top", code, more=red + spawn(fate="adopt"), **BIG))
    try:

        def all_run() -> dict[str, registry.Entry]:
            assert process.poll() is None, process.communicate()
            live = {one.agent_id: one for one in entries(world)}
            return live if len(live) == 4 and all(one.state == "Running" for one in live.values()) else {}

        live = until(all_run)
        # Given its intent is not yet ready for a signal.
        until(lambda: all("ready" in str(control_socket.ask(live[fate].path, "logs")) for fate in FATES))
        yield process, live
    finally:
        process.kill()
        process.communicate()
        on.touch()
        until(lambda: not entries(world))
        world.run(_plain(world))


def _plain(world: World) -> Path:
    """Make an agent that does nothing: any start logs the ends of killed runs."""
    return world.sign(world.package({"main.py": HEAD + "answer = ''" + TAIL}))


def check_fates(world: World, places: Path) -> None:
    """Check the end in each child's row; the child that goes on is told to end once it is alone."""
    until(lambda: {one.agent_id for one in entries(world)} == {"adopt"})
    (places / "red" / "on").touch()
    ended: dict[str, dict[str, Any]] = {}

    def have_ended() -> bool:
        ended.update({row["agent_id"]: row for row in of(world, "run_ended") if row["agent_id"] in FATES})
        return len(ended) == len(FATES)

    until(have_ended)
    assert (ended["terminate"]["code"], ended["wind-down"]["code"]) == ("parent_ended", "parent_ended")
    assert (ended["adopt"]["code"], ended["adopt"]["status"]) == (None, "ok")
    # Only the one that winds down was asked, and had its time to say something.
    assert (ended["terminate"]["stderr_bytes"], ended["wind-down"]["stderr_bytes"]) == (
        len("ready "),
        len("ready told"),
    )
    remarks = [row["reason"] for row in of(world, "run_state", agent_id="adopt")]
    assert any("goes on without it" in reason for reason in remarks)


def test_each_child_does_what_it_says_when_its_parent_ends(world: World, places: Path) -> None:
    go = places / "red" / "go"
    tail = f"import time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\nanswer = 'done'"
    with parent_of_three(world, places, tail) as (process, _):
        go.touch()
        out, err = process.communicate(timeout=60)
        assert json.loads(json.loads(out)["text"]) == "done", err
        # Those that end with it have ended before it has, and it does not wait for the one that goes on.
        assert {one.agent_id for one in entries(world)} == {"adopt"}
        check_fates(world, places)


def test_each_child_does_so_when_its_parents_keeper_is_killed(world: World, places: Path) -> None:
    with parent_of_three(world, places, "import time\ntime.sleep(600)") as (process, live):
        assert live["top"].keeper == process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        # What was reserved by it is free, and the children that go on are live without it.
        assert "top" not in {one.agent_id for one in entries(world)}
        check_fates(world, places)
    plain = _plain(world)
    assert world.run(plain).error is None  # the next start writes down what became of the killed one
    assert [row["code"] for row in of(world, "run_ended", agent_id="top")] == ["cut_off"]


# --- seen from outside --------------------------------------------------------------------------------------------


def test_all_levels_are_attested(world: World, places: Path) -> None:
    shared = places / "red"
    member(world, "leaf", "import time\ntime.sleep(600)", more=reads(str(shared), "/usr/share/doc"), **SMALL)
    middle = {"memory_mb": 512, "resources": "pids_max = 128\ncpu_millis = 500\n"}
    member(world, "middle", "answer = child('leaf', on_excess='narrow')", more=reads(str(shared)) + spawn(2), **middle)
    top = member(world, "top", "answer = child('middle')", more=reads(str(shared)) + spawn(), **BIG)
    with running(world, top, 3) as live:
        said = document(call(world.home, "attest", "--all", "--json"))
        assert {one["agent_id"]: one["holds"] for one in said["runs"]} == {"top": True, "middle": True, "leaf": True}
        assert [(one.agent_id, one.depth) for one in registry.subtree(live, live[0].run_id)] == [
            ("top", 0),
            ("middle", 1),
            ("leaf", 2),
        ]
        # A child's artefacts that were changed in its directory are not those of the log.
        changed = live[2].path / "policy" / "supervision.json"
        before = changed.read_bytes()
        changed.write_bytes(before.replace(b'"max_depth":0', b'"max_depth":9'))
        assert changed.read_bytes() != before
        assert not document(call(world.home, "attest", live[2].run_id, "--json")).get("holds", False)
        changed.write_bytes(before)


@contextlib.contextmanager
def running(world: World, package: Path, number: int) -> Iterator[list[registry.Entry]]:
    """A family under way, once so many of it run; ended by its root's end."""
    process = covenant(world, package)
    try:

        def all_run() -> list[registry.Entry]:
            live = entries(world)
            assert process.poll() is None, process.communicate()
            return live if len(live) == number and all(one.state == "Running" for one in live) else []

        yield until(all_run)
    finally:
        process.kill()
        process.communicate()
        until(lambda: not entries(world))
        world.run(_plain(world))


# --- an agent that wants more -------------------------------------------------------------------------------------


def test_what_agent_says_of_itself_counts_for_nothing(family_world: World) -> None:
    """False claims of an agent: a foreign run as parent, a path as id, a sibling's package, an unsigned package."""
    world = family_world
    member(world, "leaf", "answer = 1", **SMALL)
    unsigned = world.package({"main.py": "print(1)"}, name="unsigned", id="unsigned")
    for name in ("twin-a", "twin-b"):
        member_of(world, name, "twin")
    code = """
    import array, socket
    answer = {
        "parent": ask("spawn", agent="leaf", text="", parent="0" * 36),
        "package": ask("spawn", agent="leaf", text="", package="/workspace"),
        "path": child("../leaf"), "absolute": child("/etc"), "empty": child(""), "twin": child("twin"),
        "unsigned": child("unsigned"), "wait": ask("wait", run="0" * 36), "nobody": child("nobody"),
        "number": ask("spawn", agent=7, text=""), "time": ask("spawn", agent="leaf", text="", timeout_ms=-1),
    }
    sock = socket.socket(fileno=os.dup(3))
    try:
        sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
        answer["sent"] = True
    except OSError as e:
        answer["sent"] = False
    os.write(3, b"\\n")
    answer["line"] = hear(None)
    sock.sendmsg([json.dumps({"id": 7001, "kind": "wait", "run": "0" * 36}).encode(), b"\\n"])
    answer["sendmsg"] = hear(7001)
    sock.send(json.dumps({"id": 7002, "kind": "wait", "run": "0" * 36}).encode() + b"\\n")  # which is sendto(2)
    answer["sendto"] = hear(7002)
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        answer["inet"] = True
    except PermissionError:
        answer["inet"] = False
    answer["control"] = child("leaf")
    """
    said = answered(world, member(world, "liar", code, more=spawn(), **BIG))
    codes = {name: one["error"]["code"] for name, one in said.items() if name not in ("sent", "inet", "control")}
    assert codes == {
        **dict.fromkeys(("parent", "package", "number", "time", "line"), "malformed_request"),
        **dict.fromkeys(("path", "absolute", "empty", "twin", "nobody"), "package_invalid"),
        "unsigned": "unsigned",
        **dict.fromkeys(("wait", "sendmsg", "sendto"), "unknown_run"),
    }
    assert (said["sent"], said["inet"]) == (False, False)  # gVisor sends no descriptor of its own to the host
    assert said["control"]["ok"]["text"] == "1"
    assert not (unsigned / "agent.dsse.json").exists()


def member_of(world: World, name: str, agent_id: str) -> Path:
    return world.sign(world.package({"main.py": "print(1)"}, name=name, id=agent_id, **SMALL))


def test_agent_that_starts_itself_stops(family_world: World) -> None:
    """A package that starts itself, until a budget says no: its own, or that of the first of them."""
    world = family_world
    code = """
    said = child("again")
    answer = [said["error"]["code"]] if "error" in said else ["ok", *json.loads(said["ok"]["text"])]
    """
    tiny = {"memory_mb": 32, "resources": "pids_max = 8\ncpu_millis = 100\n"}
    member(world, "again", code, more=spawn(depth=2), **tiny)
    codes = answered(world, member(world, "first", code, more=spawn(depth=3), **BIG))
    # Its child is of its own size, and one process of that is itself: there is no room below the first.
    assert codes[:-1] == ["ok"] * (len(codes) - 1)
    assert (len(codes), codes[-1]) == (2, "rule_4_parent")


def test_floods_and_silence_harm_nobody(family_world: World) -> None:
    """Lines that are no requests, one without an end, requests faster than any rate, and answers that are not read."""
    world = family_world
    garbage = """
    try:
        for _ in range(40): os.write(3, b"nonsense\\n")
    except OSError: pass
    answer = 0
    try:
        while _answers.readline(): answer += 1
    except OSError: pass
    """
    endless = """
    try:
        while True: os.write(3, b"x" * 65536)
    except OSError as e: answer = type(e).__name__
    """
    flood = """
    import threading
    def write():
        try:
            for _ in range(200000): os.write(3, b'{"id":1,"kind":"none"}\\n')
        except OSError: pass
    threading.Thread(target=write, daemon=True).start()
    import time
    time.sleep(2)
    answer = "alive"
    """
    assert answered(world, member(world, "garbage", garbage, more=spawn(), **BIG)) <= 16
    assert answered(world, member(world, "endless", endless, more=spawn(), **BIG)) in (
        "BrokenPipeError",
        "ConnectionResetError",
    )
    code = textwrap.dedent(flood) + "\nprint(json.dumps({'text': json.dumps(answer)}), flush=True)\nos._exit(0)"
    assert answered(world, member(world, "flood", code, more=spawn(), **BIG)) == "alive"


def test_parent_that_ends_while_its_children_start_leaves_none(world: World) -> None:
    member(world, "leaf", "import time\ntime.sleep(600)", **SMALL)
    code = "for _ in range(6): send('spawn', agent='leaf', text='')\nanswer = 1"
    assert answered(world, member(world, "hasty", code, more=spawn(), **BIG)) == 1
    assert entries(world) == []
    started = of(world, "run_started", agent_id="leaf")
    ended = of(world, "run_ended", agent_id="leaf")
    assert [row["run_id"] for row in started] == [row["run_id"] for row in ended] or len(started) == len(ended)
    assert {row["code"] for row in ended} <= {"parent_ended"}


def test_child_whose_keeper_is_killed_is_said_to_be_gone_and_leaves_its_place(world: World) -> None:
    member(world, "slow", "import time\ntime.sleep(600)", **SMALL)
    member(world, "quick", "answer = 'there was a place'", **SMALL)
    code = "answer = [child('slow'), child('quick')]"
    process = covenant(world, member(world, "top", code, more=spawn(number=1), **BIG))
    slow = until(lambda: [one for one in entries(world) if (one.agent_id, one.state) == ("slow", "Running")])[0]
    os.kill(slow.keeper, signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    gone, second = json.loads(json.loads(out)["text"])
    assert gone["error"]["code"] == "cut_off", err
    assert json.loads(second["ok"]["text"]) == "there was a place"
    plain = _plain(world)
    assert world.run(plain).error is None
    assert [row["code"] for row in of(world, "run_ended", agent_id="slow")] == ["cut_off"]
