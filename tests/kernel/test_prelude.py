"""The five denials inside every interpreter before the agent's code: tried, reported, and shown to no user."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.compile.artefacts import Artefacts
from policy.denials import Denial
from sandbox.probes import preload
from sandbox.probes.preload_object import ProbeStep, build
from sandbox.probes.probe_program import Bytes, Call
from sandbox.runner import start_gate
from tests.kernel import internet, live_runs
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.test_denied_calls import told
from tests.kernel.world import HEAD, SLOWNESS, TAIL, World, refused

# What an agent can see of how it was started; then the very calls that were tried before it.
SEEN = """
import ctypes, traceback
try:
    raise ValueError("x")
except ValueError:
    trace = traceback.format_exc()
main = sys.modules["__main__"]
answer = {
    "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "modules": sorted(sys.modules), "trace": trace,
    "main": [main.__file__, main.__name__, str(main.__spec__), type(main.__loader__).__name__, main.__doc__],
    "environ": sorted(os.environ), "cmdline": open("/proc/self/cmdline").read(), "cwd": os.getcwd(),
    "pid": os.getpid(), "tmp": os.listdir("/tmp"), "fds": sorted(os.listdir("/proc/self/fd"))[:3],
}
libc = ctypes.CDLL(None, use_errno=True)
libc.chroot(b"/")
libc.chroot(b"/")
libc.execve(b"/workspace/agent.toml", None, None)
"""
OWN = {("syscall", "chroot", "not_granted"): 2, ("exec", "execve", "not_granted"): 1}
NODE = """
const fs = require("fs");
fs.readFileSync(0);
const seen = {
  argv: process.argv, exec: process.execArgv, main: require.main.filename, env: Object.keys(process.env).sort(),
  cache: Object.keys(require.cache), line: fs.readFileSync("/proc/self/cmdline", "utf8"), stack: new Error("x").stack,
};
console.log(JSON.stringify({text: JSON.stringify(seen)}));
"""


def test_agent_sees_nothing_of_it_and_its_own_tries_are_its_own(world: World) -> None:
    found = []
    for self_test in (False, True):
        world.configure(self_test=self_test)
        answer = world.run_code(HEAD + SEEN + TAIL)
        assert answer.error is None, (answer.error, answer.stderr)
        assert answer.result is not None
        found.append(json.loads(answer.result.text))
        # The first of each was not the agent's, and exactly those are not counted.
        assert told(world, answer.run_id) == OWN
    assert found[0] == found[1]
    assert found[0]["pid"] == 1


def test_nor_does_one_of_node(world: World) -> None:
    found = []
    for self_test in (False, True):
        world.configure(self_test=self_test)
        answer = world.run(world.sign(world.package({"main.js": NODE}, runtime="node", entry="main.js", memory_mb=256)))
        assert answer.error is None, (answer.error, answer.stderr)
        assert answer.result is not None
        found.append(json.loads(answer.result.text))
        assert told(world, answer.run_id) == {}
    assert found[0] == found[1]


EXEC = """
import subprocess
assert subprocess.run(["/usr/bin/cat", "/workspace/agent.toml"], capture_output=True, check=True).stdout
with open("/tmp/result", "w") as file: json.dump({"text": "from cat"}, file)
os.execv("/usr/bin/cat", ["cat", "/tmp/result"])
"""


def test_other_programs_of_agent_try_nothing_even_in_its_own_process(world: World) -> None:
    world.configure(self_test=True)
    more = '[permissions.executables]\nallow = ["/usr/bin/cat"]\n'
    answer = world.run_code(HEAD + EXEC, more=more)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.result.text == "from cat"
    assert told(world, answer.run_id) == {}


# --- a failure ----------------------------------------------------------------------------------------------------

# Told, were it reached: in no profile and in no try.
FIRST_OF_ALL = "import ctypes\nctypes.CDLL(None).syscall(309, 0, 0, 0)\n"
Tampered = Callable[[Artefacts, preload.InProcessProbes], preload.InProcessProbes]


def _allowed(artefacts: Artefacts, made: preload.InProcessProbes) -> preload.InProcessProbes:
    """Tries to make a file where the policy lets it: a sandbox that refuses less than it should."""
    step = ProbeStep(Call(257, (-100, Bytes(b"/tmp/there\0"), 0o301, 0o600)), -4095, -1)
    program = artefacts.json("config.json")["process"]["args"][0]
    return structs.replace(made, object=build(program, [step]))


def _unheard(artefacts: Artefacts, made: preload.InProcessProbes) -> preload.InProcessProbes:
    """Wait for a refusal that is never reported."""
    return structs.replace(made, told=frozenset({Denial("packet", "192.0.2.1:9/tcp", "not_granted")}))


def _not_loaded(artefacts: Artefacts, made: preload.InProcessProbes) -> preload.InProcessProbes:
    """The loader takes no such file, says so and goes on without."""
    return structs.replace(made, object=b"no shared object")


@pytest.mark.parametrize(
    ("tampered", "says", "reached"),
    [(_allowed, "is not refused inside", False), (_unheard, "nobody has told of", True), (_not_loaded, "nobody", True)],
)
def test_try_not_refused_or_not_heard_of_ends_run(
    world: World, monkeypatch: pytest.MonkeyPatch, tampered: Tampered, says: str, reached: bool
) -> None:
    real = preload.tries
    monkeypatch.setattr(preload, "tries", lambda artefacts: tampered(artefacts, real(artefacts)))
    world.configure(self_test=True, start_deadline_seconds=3 * SLOWNESS)
    with pytest.raises(errors.SelfTestError, match=says):
        world.run_code(FIRST_OF_ALL + HEAD + "answer = 1" + TAIL)
    *_, last = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    assert (last["status"], last["code"]) == ("failed", "self_test_failed")
    # Inside, nothing of the agent runs after a try that fails. Outside, it never gets its intent.
    assert (("syscall", "getcpu", "not_granted") in told(world, last["run_id"])) is reached
    assert last["stdout_bytes"] == 0


@pytest.mark.parametrize("whom", ["runsc", "sandbox"])
def test_one_that_another_kills_before_it_was_heard_of_has_crashed_and_failed_no_test(
    world: World, monkeypatch: pytest.MonkeyPatch, whom: str
) -> None:
    real = preload.tries
    monkeypatch.setattr(preload, "tries", lambda artefacts: _unheard(artefacts, real(artefacts)))
    world.configure(self_test=True, start_deadline_seconds=60 * SLOWNESS)
    running: list[start_gate.StartGate] = []
    poll = start_gate.StartGate.poll

    def noted(self: start_gate.StartGate) -> bool:
        heard = poll(self)
        running.extend([self] if self.running and self._heard is not None else [])  # no canaries
        return heard

    monkeypatch.setattr(start_gate.StartGate, "poll", noted)
    with live_runs.live(world) as one:
        live_runs.until(lambda: running)  # it waits for a refusal that is never reported
        family = one.family()
        os.kill(family.runner.name.pid if whom == "runsc" else family.sandbox.name.pid, signal.SIGKILL)
        answer = one.wait()
    assert "before the agent started" in refused(errors.SandboxCrashedError, answer.error)
    *_, last = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    assert (last["status"], last["code"]) == ("failed", "sandbox_crashed")


# --- with a network -----------------------------------------------------------------------------------------------


def test_with_network_connection_and_name_are_heard_of(
    tmp_path: Path, warm: Path, net: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net, self_test=True)
    fields: dict[str, Any] = {"network": "full", "more": internet.entries(("api.example.com", "[443]", "tls"))}
    heard: list[frozenset[Denial]] = []
    real = preload.tries

    def noted(artefacts: Artefacts) -> preload.InProcessProbes:
        made = real(artefacts)
        heard.append(made.told)
        return made

    monkeypatch.setattr(preload, "tries", noted)
    answer = world.run_code(HEAD + "answer = 1" + TAIL, **fields)
    assert answer.error is None, (answer.error, answer.stderr)
    expected = {
        Denial("packet", "169.254.169.254:80/tcp", "not_granted"),
        Denial("dns", "covenant-canary.invalid", "name_not_granted"),
    }
    assert heard == [expected]
    assert told(world, answer.run_id) == {}
    # The same once more by the agent is the agent's.
    code = internet.probes(["tcp('169.254.169.254', 80)", "resolve('covenant-canary.invalid')"])
    answer = world.run_code(HEAD + code + TAIL, **fields)
    assert answer.error is None, (answer.error, answer.stderr)
    found = told(world, answer.run_id)
    assert found["packet", "169.254.169.254:80/tcp", "not_granted"] == 1
    assert found["dns", "covenant-canary.invalid", "name_not_granted"] >= 1
    assert net.leftovers() == []
