"""The init of a run that may start programs: orphans, signals, the exit status, and an agent that attacks it."""

from __future__ import annotations

import array
import json
import os
import secrets
import select
import signal
import socket
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.compile import init
from sandbox.rootfs import init_program
from sandbox.run_result import RunResult
from tests.kernel import plain_runsc
from tests.kernel.world import HEAD, TAIL, World, refused

GRANT = {"more": '[permissions.executables]\nallow = ["/usr/bin/sort"]\n'}
# Thirty processes whose parents end before them; the states of all processes, once the last of them has ended.
ORPHANS = """
import os, time
for _ in range(30):
    child = os.fork()
    if not child:
        if not os.fork():
            time.sleep(0.2)
            os._exit(3)
        os._exit(0)
    os.waitpid(child, 0)
def states():
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found[int(name)] = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0]
        except OSError:
            pass
    return found
since = None  # all that are left are zombies; with an init they are being reaped
end = time.monotonic() + 60
while time.monotonic() < end:
    now = states()
    left = [state for number, state in now.items() if number > 2]
    since = None if set(left) - {"Z"} else since or time.monotonic()
    if not left or (since is not None and time.monotonic() - since > 5):
        break
    time.sleep(0.01)
answer = [os.getpid(), sorted(now), list(now.values()).count("Z")]
"""
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGWINCH", "SIGUSR1", "SIGUSR2", "SIGCONT")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def run(world: World, code: str, **fields: Any) -> RunResult:
    return world.run_code(HEAD + code, **{**GRANT, **fields})


def test_init_reaps_orphans(world: World) -> None:
    assert world.ask(ORPHANS, **GRANT) == [2, [1, 2], 0]


def test_orphans_stay_zombies_without_init() -> None:
    code = ORPHANS + "\nimport json\nprint(json.dumps(answer))"
    done = plain_runsc.run(["/usr/bin/python3", "-I", "-c", code], uid=1000, gid=1000, capabilities=())
    assert done.status == 0, done.stderr
    own, there, zombies = json.loads(done.stdout)
    assert (own, len(there), zombies) == (1, 31, 30)


def test_agent_without_programs_has_no_init(world: World) -> None:
    code = "answer = [os.getpid(), os.path.exists('/.covenant')]"
    assert world.ask(code) == [1, False]
    assert world.ask(code, **GRANT) == [2, True]


def test_agent_denied_a_call_of_init_has_no_init(world: World) -> None:
    code = "answer = [os.getpid(), os.path.exists('/.covenant'), os.path.exists('/usr/bin/sort')]"
    more = GRANT["more"] + '[permissions.syscalls]\ndeny = ["rt_sigtimedwait"]\n'
    assert world.ask(code, more=more) == [1, False, True]


def test_init_passes_signals_on(world: World) -> None:
    code = f"""
import signal, time
seen = []
names = {FORWARDED!r}
for name in names:
    signal.signal(getattr(signal, name), lambda number, frame: seen.append(signal.Signals(number).name))
for name in names:
    os.kill(1, getattr(signal, name))
    end = time.monotonic() + 20
    while name not in seen and time.monotonic() < end:
        time.sleep(0.001)
answer = seen
"""
    assert world.ask(code, **GRANT) == list(FORWARDED)


def test_deadline_reaches_agent_behind_init(world: World) -> None:
    code = """
import signal, time
def told(number, frame):
    print("told", number, file=sys.stderr, flush=True)
    os._exit(9)
signal.signal(signal.SIGTERM, told)
time.sleep(60)
"""
    answer = run(world, code, cpu_ms=6000)  # it has said by then what it does with SIGTERM
    assert "cpu_ms_per_task" in refused(errors.DeadlineError, answer.error)
    assert answer.stderr.strip() == f"told {int(signal.SIGTERM)}"


@pytest.mark.parametrize(
    ("code", "status"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("os.kill(os.getpid(), 6)", 134), ("os.kill(1, 15)", 143)],
)
def test_status_of_agent_is_that_of_run(world: World, code: str, status: int) -> None:
    answer = run(world, code + "\nimport time; time.sleep(60)")
    assert f"status {status}" in refused(errors.AgentFailedError, answer.error)


def test_programs_left_behind_end_with_agent(world: World) -> None:
    code = """
import time
if not os.fork():
    os.closerange(0, 3)
    time.sleep(600)
answer = "done"
"""
    assert world.ask(code, **GRANT) == "done"


# Says each signal as it comes, and with the line of its terminal all of them.
TERMINAL = """
import os, signal
seen = []
def note(number, frame):
    seen.append(number)
    os.write(1, b"signal %d\\n" % number)
for number in (signal.SIGINT, signal.SIGWINCH):
    signal.signal(number, note)
print("ready", os.getpid(), os.getpgrp(), os.tcgetpgrp(0), flush=True)
os.read(0, 100)
print("seen", seen, flush=True)
"""


def test_init_gives_agent_its_terminal(tmp_path: Path) -> None:
    """A Ctrl-C and a change of size reach the agent once each: it is the foreground group, without init."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/init").write_bytes(init_program.build())
    (tmp_path / "bin/init").chmod(0o755)
    root = plain_runsc._make_rootfs(tmp_path / "root", {}, {init.DIRECTORY: tmp_path / "bin"})
    document = plain_runsc.config([init.PROGRAM, "/usr/bin/python3", "-I", "-c", TERMINAL], rootfs=str(root))
    document["process"]["terminal"] = True  # type: ignore[index]
    (tmp_path / "config.json").write_text(json.dumps(document))
    console, container = tmp_path / "console", "init-" + secrets.token_hex(8)
    flags = [f"--root={tmp_path / 'state'}", "--platform=systrap", "--network=none", "--overlay2=none"]
    command = [plain_runsc.find_runsc(), *flags, "--ignore-cgroups", "run", f"--bundle={tmp_path}"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(console))
        listener.listen(1)
        with plain_runsc._process([*command, f"--console-socket={console}", container], container) as process:
            listener.settimeout(60)
            with listener.accept()[0] as peer:
                _, ((_, _, sent), *_), _, _ = peer.recvmsg(4096, 1024)
            master = array.array("i", sent)[0]
            try:
                assert said(master, "ready").split()[1:] == ["2", "2", "2"]
                os.write(master, b"\x03")
                assert said(master, "signal") == f"signal {int(signal.SIGINT)}"
                termios.tcsetwinsize(master, (33, 99))
                assert said(master, "signal") == f"signal {int(signal.SIGWINCH)}"
                os.write(master, b"line\n")
                assert said(master, "seen") == f"seen [{int(signal.SIGINT)}, {int(signal.SIGWINCH)}]"
                assert process.wait(60) == 0
            finally:
                os.close(master)


def said(master: int, word: str) -> str:
    """Read the terminal to the end of the line that begins with a word, after an echo or without one."""
    text = ""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([master], [], [], 1)[0]:
            text += os.read(master, 1).decode()
        if text.endswith("\n") and word in text:
            return text[text.index(word) :].strip()
        text = text if word in text else text[-len(word) :]
    raise AssertionError(text)


# --- attacked by its own agent --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, 64])
def test_init_killed_by_agent_ends_run(world: World, number: int) -> None:
    answer = run(world, f"os.kill(1, {int(number)})\nimport time; time.sleep(60)")
    assert f"status {128 + number}" in refused(errors.AgentFailedError, answer.error)


def test_init_stopped_by_agent_ends_at_deadline(world: World) -> None:
    answer = run(world, f"os.kill(1, {int(signal.SIGSTOP)})\nanswer = 1" + TAIL, cpu_ms=3000)
    assert "cpu_ms_per_task" in refused(errors.DeadlineError, answer.error)


def test_init_gives_agent_nothing(world: World) -> None:
    code = """
import ctypes, errno, shutil, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def name(act):
    try:
        return act()
    except OSError as e:
        return errno.errorcode[e.errno]
def ends(*argv):
    return subprocess.run(["/.covenant/init", *argv], capture_output=True).returncode
shutil.copy("/usr/bin/sort", "/tmp/copied")
os.chmod("/tmp/copied", 0o755)
open("/tmp/lines", "w").write("b\\na\\n")
answer = {
    "granted": ends("/usr/bin/sort", "/tmp/lines"), "copied": ends("/tmp/copied"), "itself": ends("/.covenant/init"),
    "written": name(lambda: os.open("/.covenant/init", os.O_WRONLY)),
    "made": name(lambda: os.open("/.covenant/more", os.O_WRONLY | os.O_CREAT)),
    "removed": name(lambda: os.unlink("/.covenant/init")),
    "memory": name(lambda: os.open("/proc/1/mem", os.O_RDWR)),
    "traced": [libc.ptrace(16, 1, 0, 0), errno.errorcode[ctypes.get_errno()]],
    "descriptors": os.listdir("/proc/1/fd"),
    "child ended": name(lambda: os.kill(1, 17)),
}
"""
    assert world.ask(code, **GRANT) == {
        "granted": 0, "copied": 126, "itself": 125, "written": "EACCES", "made": "EACCES", "removed": "EACCES",
        "memory": "EACCES", "traced": [-1, "EPERM"], "descriptors": [], "child ended": None,
    }  # fmt: skip


def test_init_counts_in_no_process_of_agent(world: World) -> None:
    """``pids_max`` is exact beside an init as without one: the agent and two more, and not a third."""
    code = """
import errno, time
made = []
for _ in range(3):
    try:
        child = os.fork()
    except OSError as e:
        made.append(errno.errorcode[e.errno])
        break
    if not child:
        time.sleep(60)
        os._exit(0)
    made.append("made")
answer = made
"""
    expected = ["made", "made", "EAGAIN"]
    limits = {"resources": "pids_max = 3"}
    assert world.ask(code, **limits) == expected
    assert world.ask(code, **limits, **GRANT) == expected
