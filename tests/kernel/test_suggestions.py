"""The lines that ``covenant denials`` names, applied and signed, end the denial under real runsc, and none takes its
place. The denials of the network, of memory and of clocks are in test_denials.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.denials import Denial
from policy.why import amend
from sandbox.run_result import RunResult
from tests import cli_kit
from tests.kernel.world import HEAD, TAIL, World

GPL = "/usr/share/common-licenses/GPL-3"
TRUE = '[permissions.executables]\nallow = ["/usr/bin/true"]\n'
TRY = """
import time
def tried(call):
    try:
        return call()
    except (OSError, RuntimeError) as e:
        return type(e).__name__
def spawned(path, *words):
    pid = os.posix_spawn(path, [path, *words], {})
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def summed():
    import concurrent.futures
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        return sum(pool.map(abs, range(-5, 5)))
def threads(count):
    import threading
    over = threading.Event()
    made = [threading.Thread(target=over.wait) for _ in range(count)]
    try:
        for one in made:
            one.start()
    finally:
        over.set()
    return count
"""
# What is tried, what a refused try answers and what a granted one does, the denial, and the manifest before.
CASES: dict[str, tuple[str, Any, Any, Denial, dict[str, Any]]] = {
    "call": ("tried(os.sync)", None, None, Denial("syscall", "sync", "not_granted"), {}),
    "program": (
        "tried(lambda: spawned('/bin/sh', '-c', 'exit 0'))",
        "FileNotFoundError", 0, Denial("exec", "/bin/sh", "not_granted"), {"more": TRUE},
    ),
    "file": (f"tried(lambda: len(open({GPL!r}).read()) > 0)", "FileNotFoundError", True,
             Denial("path", GPL, "not_granted"), {}),
    "scratch": ("tried(lambda: open('/tmp/x', 'wb').write(bytes(12 << 20)) >> 20)", "OSError", 12,
                Denial("disk", "disk_mb", "full"), {"disk_mb": 8, "memory_mb": 256}),
    "shared memory": ("tried(summed)", "PermissionError", 25, Denial("path", "/dev/shm", "read_only"),
                      {"memory_mb": 256}),
    "threads": ("tried(lambda: threads(6))", "RuntimeError", 6, Denial("pids", "pids_max", "too_many"),
                {"resources": "pids_max = 4"}),
}  # fmt: skip


@pytest.fixture
def telling(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Yield a world whose runs report files, and to which the command line looks."""
    monkeypatch.setenv("COVENANT_HOME", str(world.home))
    world.configure(tell_files=True, self_test=True)
    yield world
    world.configure()


def answered(world: World, path: Path) -> tuple[Any, RunResult]:
    answer = world.run(world.sign(path))
    assert answer.result is not None, (answer.error, answer.stderr)
    return json.loads(answer.result.text), answer


@pytest.mark.parametrize("name", CASES)
def test_lines_end_the_denial(telling: World, name: str) -> None:
    code, refused, granted, denial, fields = CASES[name]
    path = telling.package({"main.py": f"{HEAD}{TRY}answer = {code}\n{TAIL}"}, **fields)
    said, first = answered(telling, path)
    assert said == refused
    assert denial in [row.denial for row in first.denials]
    told = {one["denial"]: one for one in cli_kit.document("denials", path)["denials"]}
    manifest = path / "agent.toml"
    manifest.write_text(amend.document(manifest.read_text(), told[denial.id]["add"]))
    said, second = answered(telling, path)
    assert said == granted
    before, after = ({row.denial for row in one.denials} for one in (first, second))
    assert denial not in after
    # A loader tries names that this host lacks as well: no line allows those.
    assert {one for one in after - before if one.layer != "path" or os.path.exists(one.target)} == set()


def test_granted_call_breaks_no_run(telling: World) -> None:
    """`socket` without a network was a self-test that failed: it makes unix sockets, and nothing else."""
    code = HEAD + "import socket\nmade = socket.socket(socket.AF_UNIX)\n" + TRY
    code += "answer = [made.family.name, tried(socket.socket)]\n" + TAIL
    answer = telling.run_code(code, more='[permissions.syscalls]\nallow = ["socket"]\n')
    assert answer.result is not None, (answer.error, answer.stderr)
    assert json.loads(answer.result.text) == ["AF_UNIX", "PermissionError"]


def test_package_that_wants_semaphores_is_told_so(telling: World) -> None:
    path = telling.package({"main.py": HEAD + "import multiprocessing\nanswer = 1\n" + TAIL})
    answered(telling, path)
    (hint,) = cli_kit.document("denials", path)["hints"]
    assert "`main.py` uses multiprocessing" in hint
    assert "dev_shm_mb = 64" in hint
    assert hint in cli_kit.document("manifest", "check", path)["notes"]


def test_path_that_host_lacks_is_no_line(telling: World) -> None:
    code = HEAD + TRY + "answer = tried(lambda: open('/srv/covenant-none'))\n" + TAIL
    path = telling.package({"main.py": code})
    answered(telling, path)
    told = {one["target"]: one for one in cli_kit.document("denials", path)["denials"]}
    assert told["/srv/covenant-none"]["add"] == []
    assert "this host has no such path" in told["/srv/covenant-none"]["note"]


@pytest.mark.parametrize(
    "more",
    [
        '[permissions.filesystem]\nread = ["/root"]\n',
        '[permissions.filesystem]\nread = ["/srv/covenant-none"]\n',
        '[permissions.syscalls]\nallow = ["ptrace"]\n',
        '[permissions.executables]\nallow = ["/usr/bin/covenant-none"]\n',
    ],
)
def test_check_tells_what_run_refuses(telling: World, more: str) -> None:
    path = telling.package({"main.py": HEAD + "answer = 1\n" + TAIL}, more=more)
    told = cli_kit.document("manifest", "check", path)["refusals"]
    with pytest.raises(errors.CovenantError) as refused:
        telling.run(telling.sign(path))
    said = refused.value
    assert (told[0]["code"], told[0]["message"], told[0]["hint"]) == (said.code, said.message, said.hint)


def test_check_of_a_package_that_runs_tells_nothing(telling: World) -> None:
    path = telling.package({"main.py": HEAD + "answer = 1\n" + TAIL})
    assert cli_kit.document("manifest", "check", path)["refusals"] == []
    assert answered(telling, path)[0] == 1
