"""The agent reads its own limits and denials at /run/covenant, under real runsc, and can write neither."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.denials import Denial
from tests.kernel import internet, serving
from tests.kernel.conftest import leftovers
from tests.kernel.internet import NetworkedWorld
from tests.kernel.live_runs import live
from tests.kernel.serving import Served
from tests.kernel.test_command import command, shell_layer
from tests.kernel.test_standby import _warmed
from tests.kernel.world import HEAD, TAIL, World

LOOK = """
import stat
def tried(call):
    try:
        return call()
    except OSError as e:
        return e.errno
def opened(path, flags):
    fd = os.open(path, flags, 0o600)
    os.close(fd)
    return "opened"
"""
READ = """
place = "/run/covenant/"
answer = {
    "policy": json.load(open(place + "policy.json")),
    "denials": open(place + "denials.jsonl").read(),
    "names": sorted(os.listdir(place)),
    "run": sorted(os.listdir("/run")),
    "refused": [
        tried(lambda: opened(place + "policy.json", os.O_WRONLY)),
        tried(lambda: opened(place + "denials.jsonl", os.O_WRONLY | os.O_APPEND)),
        tried(lambda: opened(place + "more", os.O_WRONLY | os.O_CREAT)),
        tried(lambda: os.unlink(place + "denials.jsonl")),
        tried(lambda: os.rename(place + "policy.json", place + "other")),
        tried(lambda: os.chmod(place + "policy.json", 0o666)),
    ],
    "allowed": tried(lambda: opened("/tmp/more", os.O_WRONLY | os.O_CREAT)),
}
"""


def test_agent_reads_what_it_was_granted(world: World) -> None:
    more = '[permissions.filesystem]\nread = ["/usr/share/common-licenses"]\n'
    answer: Any = world.ask(LOOK + READ, memory_mb=96, more=more)
    policy = answer["policy"]
    assert policy["agent"] == {"id": "probe", "version": "1.0.0", "role": None}
    assert policy["grants"]["filesystem"] == {
        "mode": "ephemeral",
        "read": ["/usr/share/common-licenses"],
        "write": [],
    }
    assert policy["limits"]["memory_mb"] == 96
    assert (policy["grants"]["network"]["mode"], policy["services"]) == ("off", [])
    assert policy["denials"] == "/run/covenant/denials.jsonl"
    assert (answer["names"], answer["run"]) == (["denials.jsonl", "policy.json"], ["covenant"])
    assert answer["denials"] == ""
    assert (set(answer["refused"]) <= {1, 13, 30}, answer["allowed"]) == (True, "opened"), answer


def test_own_limits_are_attested(world: World) -> None:
    with live(world) as one:
        assert "/run/covenant" in one.made.mounts
        assert one.report().holds


TOLD = """
import time
def told(wanted):
    until = time.monotonic() + 30
    while True:
        lines = [json.loads(line) for line in open("/run/covenant/denials.jsonl")]
        if all(any(one["target"] == target for one in lines) for target in wanted) or time.monotonic() > until:
            return lines
        time.sleep(0.02)
def refused(call):
    try:
        call()
    except OSError as e:
        return type(e).__name__
"""
DENIED = """
before = told([])
answer = {
    "before": before,
    "tried": [refused(lambda: open("/srv/covenant-own-denials")), refused(lambda: os.execv("/usr/bin/true", ["true"]))],
    "told": told(["/srv/covenant-own-denials", "execve"]),
}
"""


@pytest.fixture
def telling(world: World) -> Iterator[World]:
    """Yield a world whose runs report files that are not there."""
    world.configure(tell_files=True)
    yield world
    world.configure()


def test_agent_reads_its_denials_as_they_come(telling: World) -> None:
    answer = telling.ask(TOLD + DENIED)
    assert answer["tried"] == ["FileNotFoundError", "PermissionError"]
    assert not any(one["target"] == "execve" for one in answer["before"])
    found = {one["target"]: one for one in answer["told"]}
    path, program = found["/srv/covenant-own-denials"], found["execve"]
    assert path["id"] == Denial("path", "/srv/covenant-own-denials", "not_granted").id
    assert (path["grant"], path["count"]) == ("permissions.filesystem", 1)
    assert path["add"] == ["[permissions.filesystem]", 'read = ["/srv/covenant-own-denials"]']
    assert path["meaning"] == "the path is not in the agent's root"
    assert (program["layer"], program["code"]) == ("exec", "not_granted")
    assert abs(program["at_ms"] - time.time() * 1000) < 60_000


def test_granted_act_is_no_denial(telling: World) -> None:
    """The control: the same open of a path that is granted."""
    path = "/usr/share/common-licenses/GPL-3"
    more = f'[permissions.filesystem]\nread = ["{path}"]\n'
    code = f"answer = [refused(lambda: open({path!r})), refused(lambda: open('/srv/none')), told(['/srv/none'])]\n"
    answer = telling.ask(TOLD + code, more=more)
    assert answer[:2] == [None, "FileNotFoundError"]
    assert path not in [one["target"] for one in answer[2]]


def test_refused_connection_is_told(tmp_path: Path, warm: Path) -> None:
    with internet.made() as net:
        networked = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
        calls = "tcp('93.184.216.34', 80)", "tcp('93.184.216.35', 80)"
        code = f"{internet.probes(calls)}{TOLD}answer = [answer, told(['93.184.216.34:80/tcp'])]\n"
        granted = internet.entries(("93.184.216.35", "[80]", "tcp"))
        (refused, allowed), told = networked.ask(code, network="full", more=granted)
        assert (refused, allowed) == ("ECONNREFUSED", "connected")
        (row,) = [one for one in told if one["layer"] == "packet"]
        assert row["target"] == "93.184.216.34:80/tcp"
        assert row["add"] == ["[[permissions.network]]", 'host = "93.184.216.34"', "ports = [80]", 'protocol = "tcp"']
        assert net.leftovers() == []


NODE = """
const fs = require("fs"), { spawnSync } = require("child_process");
const lines = () => fs.readFileSync("/run/covenant/denials.jsonl", "utf8").split("\\n").filter(Boolean).map(JSON.parse);
process.stdin.once("data", () => {
  const policy = JSON.parse(fs.readFileSync("/run/covenant/policy.json"));
  const failed = spawnSync("/usr/bin/true").error.code, until = Date.now() + 30000;
  const look = setInterval(() => {
    const found = lines().filter((one) => one.layer === "exec");
    if (!found.length && Date.now() < until) return;
    clearInterval(look);
    console.log(JSON.stringify({ text: JSON.stringify([policy.agent.id, failed, found.map((one) => one.target)]) }));
    process.exit(0);
  }, 20);
});
"""


def test_node_reads_both(world: World) -> None:
    package = world.package({"main.js": NODE}, runtime="node", entry="main.js", memory_mb=512)
    answer = world.run(world.sign(package))
    assert answer.result is not None, (answer.error, answer.stderr)
    assert json.loads(answer.result.text) == ["probe", "EPERM", ["execve"]]


COMMAND = """
/usr/bin/env || until grep -q usr/bin/env /run/covenant/denials.jsonl; do :; done
cat /run/covenant/policy.json; echo; cat /run/covenant/denials.jsonl
echo x >> /run/covenant/denials.jsonl || echo refused
"""


def test_command_reads_both(world: World, tmp_path: Path) -> None:
    layer = shell_layer(world, tmp_path)
    more = f'[root]\nlayers = ["{layer}"]\n[permissions.executables]\nallow = ["/usr/bin/cat", "/usr/bin/grep"]\n'
    answer = world.run(command(world, "sh", f"['-c', '''{COMMAND}''']", more))
    assert answer.result is not None, (answer.error, answer.stderr)
    text = answer.result.text
    policy, end = json.JSONDecoder().raw_decode(text)
    assert [one["path"] for one in policy["grants"]["executables"]["allow"]] == ["/usr/bin/cat", "/usr/bin/grep"]
    *lines, last = text[end:].strip().splitlines()
    assert "/usr/bin/env" in [json.loads(line)["target"] for line in lines]
    assert last == "refused"


WARM = (
    HEAD
    + TOLD
    + """
answer = [intent["text"], refused(lambda: os.execv("/usr/bin/true", ["true"])), told(["execve"])]
"""
    + TAIL
)


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as place:
        world = World(place, warm=warm)
        with Served(world) as made:
            yield made
        assert leftovers(world) == []


def test_warm_sandbox_tells_its_agent(served: Served) -> None:
    path, (instance,) = _warmed(served, "tells", WARM)
    answer = served.run(path, "warm")
    assert answer.run_id == instance.run_id
    assert answer.error is None, answer
    assert answer.result is not None
    text, refused, told = json.loads(answer.result.text)
    assert (text, refused) == ("warm", "PermissionError")
    assert [one["id"] for one in told] == [Denial("exec", "execve", "not_granted").id]
