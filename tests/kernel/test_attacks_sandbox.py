"""Attacks on everything between a verified package and the kernel: by an agent, by an ordinary user of the host, by
a package's author, by a crash at a bad moment. Each beside its positive control.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.rundir import registry
from tests.kernel import revoking
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


def test_terminal_cannot_stop_clock(world: World, backend: dict[str, Any]) -> None:
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
    out, err = process.communicate(timeout=60)
    assert b'"deadline"' in out, (out, err)
    assert ends(world)[-1]["code"] == "deadline"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
def test_whatever_ends_supervisor_ends_run_with_row(
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
    process.communicate(timeout=60)
    assert [row["code"] for row in ends(world)] == ["interrupted"]
    assert leftovers(world) == []


def test_run_whose_supervisor_was_killed_has_its_last_row_at_next_start(world: World, backend: dict[str, Any]) -> None:
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


def test_closed_descriptors_of_caller_do_not_become_logs(world: World, backend: dict[str, Any]) -> None:
    package = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}, **backend))
    process = covenant(world, package, "/bin/sh", "-c", '"$@" <&- 2>&-', "sh")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert [row["status"] for row in ends(world)] == ["ok"]
    # Without stdout the answer would be lost: nothing runs.
    process = covenant(world, package, "/bin/sh", "-c", '"$@" <&- >&- 2>&-', "sh")
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(ends(world)) == 1
    assert verified(world)


def test_caller_that_ignores_its_children_does_not_hide_how_agent_ended(world: World, backend: dict[str, Any]) -> None:
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
def test_exit_status_that_no_signal_has_is_not_logged_as_one(
    world: World, backend: dict[str, Any], status: int, row: tuple[int | None, int | None]
) -> None:
    answer = world.run_code(HEAD + f"os._exit({status})", **backend)
    refused(errors.AgentFailedError, answer.error)
    assert (ends(world)[-1]["exit_status"], ends(world)[-1]["exit_signal"]) == row


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGRTMIN + 1, "SIGRTMIN+1"), (33, "signal 33")]
)
def test_signal_that_ended_agent_is_named(world: World, backend: dict[str, Any], number: int, name: str) -> None:
    answer = world.run_code(f"{HEAD}os.kill(os.getpid(), {int(number)})\nimport time\ntime.sleep(20)", **backend)
    assert f"was killed by {name}, or" in refused(errors.AgentFailedError, answer.error)
    assert (ends(world)[-1]["exit_status"], ends(world)[-1]["exit_signal"]) == (None, int(number))


def test_live_trusted_local_run_holds_its_agents_id(world: World) -> None:
    """Rule 8 for the backend that has no sandbox: packages of two operators are never live under one id."""
    second = revoking.second_operator(world)
    package = world.sign(world.package({"main.py": sleeper(4)}, **LOCAL))
    other = world.sign(world.package({"main.py": HEAD + "answer = 2" + TAIL}, name="other"), key=second)
    process = covenant(world, package)
    wait(lambda: list((world.state / "runs").glob("*/label.json")))
    with pytest.raises(errors.CovenantError) as refusal:
        world.run(other)
    assert refusal.value.code == "rule_8_identity", refusal.value
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert world.run(other).error is None


def test_two_packages_of_one_id_that_start_at_once_do_not_both_run(
    world: World, backend: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 8 looks at live runs, and a run can be seen only after it was decided: the other one starts in between.

    Another operator signed the second; the newer of one operator's wins (test_newer_serial.py)."""
    key = revoking.second_operator(world)
    first = world.sign(world.package({"main.py": sleeper(4)}, name="first", **backend))
    second = world.package({"main.py": HEAD + "answer = 2" + TAIL}, name="second", **backend)
    world.sign(second, key=key)
    looked = registry.live
    started: list[subprocess.Popen[bytes]] = []
    before: list[Any] = []

    def late(runs: Path) -> Any:
        """Return the state before the other run came, however often it is read: only the claim sees both."""
        if not started:
            before.extend(looked(runs))
            started.append(covenant(world, first))
            wait(lambda: list(runs.glob("*/label.json")))
        return list(before)

    monkeypatch.setattr(registry, "live", late)
    with pytest.raises(errors.IdentityViolation):
        world.run(second)
    started[0].communicate(timeout=30)
    assert started[0].returncode == 0
    assert [row["code"] for row in ends(world)] == [None]
    rejected = [row["kind"] for row in world.rows() if row["kind"]["type"] == "manifest_rejected"]
    assert [row["code"] for row in rejected] == ["rule_8_identity"], "it was refused before its start"


# --- an agent that wants more than it was granted ---------------------------------------------------------------

SHARED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmdt.argtypes = [ctypes.c_void_p]
held = 0
for _ in range(12):
    segment = libc.shmget(0, 16 << 20, 0o1600)
    if segment < 0: break
    at = libc.shmat(segment, None, 0)
    ctypes.memset(at, 1, 16 << 20)
    libc.shmdt(at)
    held += 16
answer = [held, libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600)]
"""


def test_memory_that_belongs_to_no_process_is_not_to_be_had_without_cgroup(world: World) -> None:
    bare = f"import json\n{SHARED}\nprint(json.dumps(answer))"
    control = subprocess.run(["unshare", "--ipc", sys.executable, "-c", bare], capture_output=True, check=True)
    assert control.stdout == b"[192, 0, 0]\n"
    assert world.ask(SHARED, **LOCAL, memory_mb=64) == [0, -1, -1]


def test_in_sandbox_cgroup_bounds_it(world: World) -> None:
    allow = '[permissions.syscalls]\nallow = ["shmget", "shmat", "shmdt", "msgget", "semget"]\n'
    assert world.ask(SHARED, memory_mb=512, more=allow)[0] == 192
    answer = world.run_code(HEAD + SHARED.replace("range(12)", "range(64)") + TAIL, memory_mb=64, more=allow)
    refused(errors.OutOfMemoryError, answer.error)


def test_grant_gives_what_everybody_may_read_and_no_more(world: World, granted: Path) -> None:
    """The gofer could read it all; a file that is its owner's alone stays so, and a link leads nowhere outside."""
    code = f"""
answer = {{}}
for name in ("open", "secret", "link", "hard/open", "pipe"):
    try:
        answer[name] = open("{granted}/" + name).read() if name != "pipe" else str(os.open("{granted}/pipe", os.O_RDWR))
    except OSError as e: answer[name] = e.errno
try: os.open("{granted}/open", os.O_WRONLY)
except OSError as e: answer["write"] = e.errno
"""
    (granted / "open").write_text("for all")
    (granted / "open").chmod(0o666)
    (granted / "secret").write_text("for root")
    (granted / "secret").chmod(0o600)
    (granted / "link").symlink_to("/etc/hostname")
    (granted / "hard").mkdir(mode=0o700)
    (granted / "hard" / "open").write_text("behind a door")
    os.mkfifo(granted / "pipe", 0o666)
    (granted / "pipe").chmod(0o666)
    assert Path("/etc/hostname").exists()
    grant = f'[permissions.filesystem]\nread = ["{granted}"]\n'
    got = world.ask(code, more=grant)
    assert got.pop("open") == "for all"
    assert got["secret"] == got["hard/open"] == 13
    assert got["link"] == 2
    assert got["write"] == 30
    assert got["pipe"] in {1, 6, 30}, "a pipe of the host is a channel"


def test_only_writable_place_is_bounded_one(world: World) -> None:
    code = """
answer = []
for folder, folders, _ in os.walk("/"):
    if folder == "/proc": folders[:] = ["sys", "self"]
    try:
        os.close(os.open(os.path.join(folder, ".x"), os.O_CREAT | os.O_WRONLY))
        answer.append(folder)
    except OSError: pass
"""
    assert world.ask(code) == ["/tmp"]
    assert world.ask(code, filesystem="read-only-package") == []


@pytest.fixture
def granted() -> Iterator[Path]:
    """A directory that root alone can change, all the way down; what pytest makes lies below one that it cannot."""
    path = Path(f"/srv/covenant-test-{os.getpid()}")
    path.mkdir(mode=0o755)
    yield path
    shutil.rmtree(path)


def test_swapped_component_is_not_followed(world: World, granted: Path) -> None:
    """Between two looks at a name an owner of a directory above could put another tree there."""
    (granted / "real").mkdir()
    (granted / "real" / "f").write_text("mine")
    grant = f'[permissions.filesystem]\nread = ["{granted}/real"]\n'
    code = f"answer = open('{granted}/real/f').read()"
    assert world.ask(code, more=grant) == "mine"
    os.chown(granted, 12345, -1)
    for refusal in ("belongs to uid 12345", "can be written by others"):
        with pytest.raises(errors.GrantedPathError, match=refusal):
            world.ask(code, more=grant)
        os.chown(granted, 0, 0)
        granted.chmod(0o777)
    granted.chmod(0o755)
    (granted / "real").rename(granted / "moved")
    # A link of root is followed (ADR 0074), to where a grant may lead. A link of another user is not.
    link = granted / "real"
    link.symlink_to(granted / "moved")
    assert world.ask(code, more=grant) == "mine"
    os.lchown(link, 12345, -1)
    with pytest.raises(errors.GrantedPathError, match="symlink"):
        world.ask(code, more=grant)
    link.unlink()
    link.symlink_to("/etc")
    with pytest.raises(errors.NeverGrantableError, match="leads to `/etc`"):
        world.ask(code, more=grant)


def test_many_lines_no_lines_and_lines_that_never_end(world: World, backend: dict[str, Any]) -> None:
    """Any output on stdout ends as one error of the contract, within the deadline, and the log counts it."""
    flood = "os.write(1, b'a\\n' * (4 << 20)); os.write(1, b'a\\n' * (2 << 20))"
    for code, kind in (
        (flood, errors.MalformedOutputError),
        ("print('{\"text\": \"' + 'a' * (5 << 20) + '\"}')", errors.OutputTooLargeError),
        ("print('[' * 1000000)", errors.MalformedOutputError),
        ("print('{\"text\": ' + '9' * 1000000 + '}')", errors.MalformedOutputError),
        ('print(\'{"text": "\\\\ud800"}\')', errors.MalformedOutputError),
        ('sys.stdout.buffer.write(b\'{"text": "\\xff"}\')', errors.MalformedOutputError),
    ):
        write_all = "\n_w = os.write\ndef write(fd, b):\n    while b: b = b[_w(fd, b):]\nos.write = write\n"
        answer = world.run_code(HEAD + write_all + code, memory_mb=256, **backend)
        refused(kind, answer.error)
        assert ends(world)[-1]["stdout_bytes"] > 0
