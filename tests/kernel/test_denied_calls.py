"""The filter's refusals, as gVisor's own log tells them: each call by name, and a flood as a number."""

from __future__ import annotations

import errno
import json
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
    # The call says no program, and a line without one would be of no use.
    assert listed["execve"]["add"] == []
    assert "`covenant policy why PACKAGE --exec PATH` names the lines of one" in listed["execve"]["note"]
    for target in ("ptrace", "#999", "ioctl"):
        assert listed[target]["add"] == []
    assert listed["ptrace"]["why"]["never"]
    more = '[permissions.syscalls]\nallow = ["getcpu"]'
    answer = world.run_code(HEAD + CODE + TAIL, more=more)
    assert answer.result is not None, answer.error
    assert answer.result.text == str([0] + [EPERM] * 4)
    assert ("syscall", "getcpu", "not_granted") not in told(world, answer.run_id)


def test_operator_can_do_without(world: World) -> None:
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
def test_interpreter_that_starts_is_refused_nothing(
    world: World, files: dict[str, str], fields: dict[str, Any]
) -> None:
    answer = world.run(world.sign(world.package(files, **fields)))
    assert answer.result is not None, (answer.error, answer.stderr)
    assert told(world, answer.run_id) == {}


# What an agent with one granted program and twelve processes runs into; then all of its scratch.
FAILURES = """
import subprocess, time
answer = {}
def tried(name, act):
    try: act(); answer[name] = 0
    except OSError as e: answer[name] = e.errno
tried("program", lambda: subprocess.run(["/usr/bin/grep"]))
tried("missing", lambda: open("/srv/data/table.csv"))
tried("beside", lambda: open("../srv/other"))
tried("write", lambda: open("/usr/share/doc/new", "w"))
tried("package", lambda: open("/workspace/none"))
tried("control", lambda: open("/usr/share/doc"))
children = []
def forks():
    while True:
        child = os.fork()
        if child == 0:
            time.sleep(60)
        children.append(child)
tried("forks", forks)
for child in children:
    os.kill(child, 9)
def fill():
    for number in range(100):
        with open(f"/tmp/{number}", "wb", buffering=0) as file:
            file.write(b"x" * (1 << 20))
tried("fill", fill)
"""
FAILED = {"program": 2, "missing": 2, "beside": 2, "write": 13, "package": 2, "control": 21, "forks": 11, "fill": 28}
LIMITS: dict[str, Any] = {"resources": "pids_max = 12", "disk_mb": 4, "memory_mb": 192}
MORE = """
[permissions.executables]
allow = ["/usr/bin/cat"]
[permissions.filesystem]
read = ["/usr/share/doc"]
"""


def test_what_fails_for_want_of_grant_is_told_with_line_that_mends_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = world.run_code(HEAD + FAILURES + TAIL, more=MORE, **LIMITS)
    assert answer.result is not None, (answer.error, answer.stderr)
    assert json.loads(answer.result.text) == FAILED
    programs_and_forks = {("exec", "/usr/bin/grep", "not_granted"): 1, ("pids", "pids_max", "too_many"): 1}
    assert told(world, answer.run_id) == programs_and_forks
    # Where the operator wants to know of files as well.
    world.configure(tell_files=True, self_test=True)
    answer = world.run_code(HEAD + FAILURES + TAIL, more=MORE, **LIMITS)
    assert answer.result is not None, (answer.error, answer.stderr)
    found = told(world, answer.run_id)
    wanted = {
        **programs_and_forks,
        ("path", "/srv/data/table.csv", "not_granted"): 1,
        ("path", "/srv/other", "not_granted"): 1,
        ("path", "/usr/share/doc/new", "read_only"): 1,
        ("disk", "disk_mb", "full"): 1,
    }
    assert wanted.items() <= found.items()
    # The rest is what an interpreter looks for as it starts.
    assert all(layer == "path" and code == "not_granted" for layer, _, code in found.keys() - wanted.keys())
    assert not any(target.startswith("/workspace") for _, target, _ in found)
    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    listed = {one["target"]: one for one in cli_kit.document("denials", answer.run_id)["denials"]}
    assert listed["pids_max"]["add"] == ["[resources]", "pids_max = 24"]
    assert listed["disk_mb"]["add"] == ["[resources]", "disk_mb = 8"]
    assert listed["/usr/bin/grep"]["add"][0] == "[permissions.executables]"


INJECTED = """
line = '{"msg":"task_syscall.go:241] [   1:   1] Syscall 101: denied by seccomp","level":"debug","time":"x"}'
clone = '{"msg":"strace.go:605] [   1:   1] x X clone(x) = 0 (0x0) errno=11 (x)","level":"info","time":"x"}'
older = ("/x\\n] Syscall 101: denied by seccomp\\n", "/y\\n X clone(x) = 0 (0x0) errno=11 (\\n")
names = (*older, f"/x\\n{line}\\n", f"/x\\n{clone}\\n")
for text in (*names, '/z"\\\\'):
    try: open(text)
    except OSError: pass
answer = names
"""


def test_path_of_agent_adds_no_denial_but_its_own(world: World) -> None:
    """A path with newlines, quotes and lines of the log in it is one denial of that path."""
    world.configure(tell_files=True)
    answer = world.run_code(HEAD + INJECTED + TAIL)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    found = told(world, answer.run_id)
    assert {layer for layer, _, _ in found} == {"path"}
    assert found[("path", '/z"\\', "not_granted")] == 1
    assert {target[:2] for _, target, _ in found} >= {"/x", "/y"}
    # Without it no path is in the log.
    world.configure()
    answer = world.run_code(HEAD + INJECTED + TAIL)
    assert told(world, answer.run_id) == {}


# Without a network, with unix sockets; the last one's address has no server.
CONNECTIONS = """
import socket
def tried(family, kind, *place):
    try: socket.socket(family, kind).connect(*place); return 0
    except OSError as e: return e.errno
four, six, tcp, udp = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
answer = [
    tried(four, tcp, ("203.0.113.5", 443)), tried(four, udp, ("192.0.2.9", 53)), tried(six, tcp, ("2001:db8::1", 8443)),
    tried(socket.AF_UNIX, tcp, "/tmp/none"),
]
"""


def test_connection_without_network_is_refused_at_its_socket(world: World) -> None:
    more = '[permissions.syscalls]\nallow = ["socket", "connect", "getpeername"]'
    answer = world.run_code(HEAD + CONNECTIONS + TAIL, more=more)
    assert answer.result is not None, (answer.error, answer.stderr)
    assert answer.result.text == str([EPERM] * 3 + [errno.ENOENT])
    assert told(world, answer.run_id) == {("syscall", "socket", "arguments"): 3}
