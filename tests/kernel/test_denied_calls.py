"""The filter's refusals, as gVisor's own log tells them: each call by name, and a flood as a number."""

from __future__ import annotations

from typing import Any

import pytest

from policy.denials import Denial
from tests import cli_kit
from tests.kernel.world import HEAD, TAIL, World

# getcpu is in no profile, ptrace is on the deny list, 999 is no call; ioctl is granted with other arguments.
CODE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    return ctypes.get_errno() if libc.syscall(number, *arguments) == -1 else 0
answer = [call(309, 0, 0, 0), call(101, 0), call(999), call(16, 0, 0x40049409), call(59, b"/usr/bin/true", 0, 0)]
for _ in range(20000): call(309, 0, 0, 0)
"""
EPERM, ENOSYS = 1, 38


def told(world: World, run_id: str) -> dict[tuple[str, str, str], int]:
    """How often each denial of a run is in the log."""
    found: dict[tuple[str, str, str], int] = {}
    for row in (row["kind"] for row in world.rows()):
        if row["type"] == "denied" and row["run_id"] == run_id:
            key = (row["layer"], row["target"], row["code"])
            found[key] = found.get(key, 0) + row["count"]
    return found


def test_each_refused_call_is_told_and_its_line_mends_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = world.run_code(HEAD + CODE + TAIL)
    assert answer.result is not None, (answer.error, answer.stderr)
    assert answer.result.text == str([EPERM] * 5)
    assert told(world, answer.run_id) == {
        ("syscall", "getcpu", "not_granted"): 20001,
        ("syscall", "ptrace", "not_granted"): 1,
        ("syscall", "#999", "not_granted"): 1,
        ("syscall", "ioctl", "arguments"): 1,
        ("exec", "execve", "not_granted"): 1,
    }
    rows = [row["kind"] for row in world.rows() if row["kind"]["type"] == "denied"]
    assert rows[0]["denial"] == Denial("syscall", "getcpu", "not_granted").id
    assert len(rows) < 40
    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    listed = {one["target"]: one for one in cli_kit.document("denials", answer.run_id)["denials"]}
    assert listed["getcpu"]["add"] == ["[permissions.syscalls]", 'allow = ["getcpu"]']
    assert listed["execve"]["add"][0] == "[permissions.executables]"
    for target in ("ptrace", "#999", "ioctl"):
        assert listed[target]["add"] == []
    assert listed["ptrace"]["why"]["never"]
    more = '[permissions.syscalls]\nallow = ["getcpu"]'
    answer = world.run_code(HEAD + CODE + TAIL, more=more)
    assert answer.result is not None, answer.error
    assert answer.result.text == str([0] + [EPERM] * 4)
    assert ("syscall", "getcpu", "not_granted") not in told(world, answer.run_id)


def test_an_operator_can_do_without(world: World) -> None:
    world.configure(tell_calls=False)
    code = HEAD + CODE.replace("20000", "1") + TAIL
    answer = world.run_code(code)
    assert answer.result is not None, (answer.error, answer.stderr)
    assert told(world, answer.run_id) == {}


NODE = {"main.js": 'require("fs").readFileSync(0); console.log(JSON.stringify({text: "x"}));\n'}


@pytest.mark.parametrize(
    ("files", "fields"),
    [({"main.py": HEAD + "answer = 1" + TAIL}, {}), (NODE, {"runtime": "node", "entry": "main.js", "memory_mb": 256})],
    ids=["python3", "node"],
)
def test_an_interpreter_that_starts_is_refused_nothing(
    world: World, files: dict[str, str], fields: dict[str, Any]
) -> None:
    answer = world.run(world.sign(world.package(files, **fields)))
    assert answer.result is not None, (answer.error, answer.stderr)
    assert told(world, answer.run_id) == {}
