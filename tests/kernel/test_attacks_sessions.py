"""Attacks on sessions and their surroundings: arguments, layers, limits, init, terminals. Each beside its control."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from policy import errors
from policy.signing import change
from sandbox.layers.store import LayerStore
from sandbox.run_result import RunResult
from tests.kernel import revoking
from tests.kernel.test_command import command
from tests.kernel.test_contract_terminal import TERMINAL, Screen, screen
from tests.kernel.world import World

__all__ = ["screen"]


@pytest.mark.parametrize(
    ("arguments", "places", "size"), [(1, 2, 70_000), (4, 1, 60_000), (50, 2000, 131_000)], ids=["one", "all", "13 GB"]
)
def test_intent_in_many_places_is_refused(world: World, arguments: int, places: int, size: int) -> None:
    """Nothing is put together, and no sandbox waits for its deadline."""
    package = command(world, "/usr/bin/echo", json.dumps(["{intent}" * places] * arguments))
    with pytest.raises(errors.UsageError, match="a start takes"):
        world.run(package, text="A" * size)
    assert not [row for row in world.rows() if row["kind"]["type"] == "run_started"]
    control = world.run(package, text="A")
    assert control.result is not None, (control.error, control.stderr)
    assert control.result.text.count("A") == arguments * places


def test_arguments_of_manifest_have_a_bound(world: World) -> None:
    with pytest.raises(errors.UsageError, match="arguments of the agent are 208013"):
        world.run(command(world, "/usr/bin/echo", json.dumps(["B" * 16_000] * 13)))
    control = world.run(command(world, "/usr/bin/echo", json.dumps(["B" * 16_000] * 12)))
    assert control.result is not None, (control.error, control.stderr)


ASKS_SORT = (
    "import subprocess\nanswer = subprocess.run(['/usr/bin/sort', '--version'], capture_output=True).stdout.decode()"
)


def _pinned(world: World, tree: Path) -> str:
    """Return the sections that pin the host's sort over a layer of this tree, which may start programs too."""
    ref = LayerStore(world.state).pack_tree(tree, "over").ref
    digest = hashlib.sha256(Path("/usr/bin/sort").read_bytes()).hexdigest()
    allow = json.dumps([f"/usr/bin/sort@sha256:{digest}", "layer:over"])
    return f'[root]\nlayers = ["{ref}"]\n[permissions.executables]\nallow = {allow}\n'


@pytest.mark.parametrize("folder", ["bin", "usr/bin"])
def test_layer_replaces_no_pinned_program(world: World, tmp_path: Path, folder: str) -> None:
    """In the root /bin is a link to /usr/bin, so that bin/sort of a layer is /usr/bin/sort there."""
    (tmp_path / "control/srv").mkdir(parents=True)
    assert "sort (GNU" in world.ask(ASKS_SORT, more=_pinned(world, tmp_path / "control"))
    (tmp_path / "hostile" / folder).mkdir(parents=True)
    shutil.copy("/usr/bin/env", tmp_path / "hostile" / folder / "sort")
    with pytest.raises((errors.LayerError, errors.ProgramError), match="/usr/bin/sort"):
        world.ask(ASKS_SORT, more=_pinned(world, tmp_path / "hostile"))


FLOODS = """
import os, signal
for number in {*range(1, 32)} - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print("READY", flush=True)
while True:
    os.write(1, b"x" * 4096)
"""


def test_session_does_not_outlive_revocation(world: World, screen: Screen) -> None:
    """The agent ignores every signal, and its caller has stopped to read."""
    package = world.sign(world.package({"main.py": FLOODS}, more=TERMINAL, cpu_ms=300_000))
    answers: list[RunResult] = []
    run = threading.Thread(target=lambda: answers.append(world.run(package, "", caller=screen.streams)))
    run.start()
    shown = b""
    while b"READY" not in shown:
        shown += os.read(screen.stdout, 64)
    last = world.now_ms + 1_000  # above every serial of this world
    revoking.revoke(
        world,
        revoking.next_root(
            world, lambda root: change.revoke_serials(root, "probe", last, now_ms=world.now_ms, reason="it leaks")
        ),
    )
    run.join(60)
    assert [type(one.error) for one in answers] == [errors.RunRevokedError]


# Each line is a try, and whether it passed. The first of a group is its control.
REACHES = """
import ctypes, fcntl, os, shutil, subprocess
libc = ctypes.CDLL(None, use_errno=True)
found = {}
def tries(name, act):
    try: found[name] = act() not in (-1, 126)
    except OSError: found[name] = False
FILE, LIMITS = "/run/covenant/denials.jsonl", "/run/covenant"
tries("limits: read", lambda: open(FILE).read() and None)
tries("limits: write", lambda: open(FILE, "a"))
tries("limits: truncate", lambda: os.truncate(FILE, 0))
tries("limits: remove", lambda: os.unlink(FILE))
tries("limits: replace", lambda: os.rename(LIMITS, "/tmp/x"))
tries("limits: mode", lambda: os.chmod(FILE, 0o777))
tries("limits: mount", lambda: libc.mount(b"none", LIMITS.encode(), b"tmpfs", 0, None))
for name, number, argument in (
    ("size", 0x5413, b"01234567"), ("STI", 0x5412, b"x"), ("LINUX", 0x541C, b"\\2"), ("CONS", 0x541D, 0),
    ("SETD", 0x5423, b"\\0" * 4), ("EXCL", 0x540C, 0), ("PKT", 0x5420, b"\\1\\0\\0\\0"), ("VHANGUP", 0x5437, 0),
    ("GPTPEER", 0x5441, 2),
):
    tries(f"terminal: {name}", lambda: fcntl.ioctl(0, number, argument) and None)
tries("terminal: STI in 64 bits", lambda: libc.syscall(16, 0, ctypes.c_ulong(0x100005412), b"x"))
tries("start: of the root", lambda: subprocess.run(["/usr/bin/env", "true"], check=False).returncode)
shutil.copy("/usr/bin/true", "/tmp/true")
open("/tmp/script", "w").write("#!/usr/bin/env true\\n")
for file in ("true", "script"):
    os.chmod(f"/tmp/{file}", 0o755)
    tries(f"start: {file} of /tmp", lambda: subprocess.run([f"/tmp/{file}"], check=False).returncode)
fd = os.open("/tmp/true", os.O_RDONLY)
tries("start: by descriptor", lambda: subprocess.run([f"/proc/self/fd/{fd}"], pass_fds=[fd], check=False).returncode)
tries("start: execveat", lambda: libc.syscall(322, fd, b"", None, None, 0x1000))
tries("start: memfd", lambda: os.memfd_create("x"))
tries("init: signal 0", lambda: os.kill(1, 0))
tries("init: ptrace", lambda: libc.syscall(101, 16, 1, 0, 0))
tries("init: memory", lambda: open("/proc/1/mem", "rb"))
tries("init: memory by call", lambda: libc.syscall(310, 1, 0, 0, 0, 0, 0))
tries("init: root", lambda: os.listdir("/proc/1/root"))
print("FOUND", *sorted(name for name, passed in found.items() if passed), sep="|")
print("TRIED", len(found))
"""


def test_session_reaches_nothing_else(world: World, screen: Screen) -> None:
    screen.acts()
    more = TERMINAL + '[permissions.executables]\nallow = ["/usr/bin/env", "/usr/bin/true"]\n'
    done = world.run(world.sign(world.package({"main.py": REACHES}, more=more)), "", caller=screen.streams)
    screen.joined()
    assert done.error is None, (done.error, done.stderr, screen.shown)
    lines = dict(line.partition("|")[::2] for line in screen.shown.decode().splitlines() if line.startswith("FOUND"))
    assert lines["FOUND"].split("|") == ["init: signal 0", "limits: read", "start: of the root", "terminal: size"]
    assert "TRIED 28" in screen.shown.decode()
