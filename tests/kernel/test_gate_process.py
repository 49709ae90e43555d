"""A gate's own process, as the kernel sees it: no rights, no way to get any, and an end that is noticed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from policy import denials, errors
from policy.compile.network import firewall
from sandbox.network.gate import credit_meter, prefork, process
from tests.kernel.live_runs import until

UID = firewall.GATE_UID
# More destinations than the line holds, and than a gate may report at once.
COUNTED = 512
PROBES = ("open", "socket", "fork", "exec", "kill", "memfd")


def _gate(
    fd: int,
    module: str = "tests.kernel.echo_gate",
    *,
    calls: Collection[str] = (),
    meter: int | None = None,
    counted: int = COUNTED,
) -> process.Gate:
    fds = {"agent": fd, **({} if meter is None else {"meter": meter})}
    plan = {"word": "a word", "counted": counted}
    return process.Gate(module, "dns", {"refused"}, UID, plan, fds, calls=calls, counts=meter is not None)


class _Echo:
    """The started gate and a line to it."""

    def __init__(self, started: process.GateProcess, line: socket.socket) -> None:
        self.started, self.line = started, line

    def ask(self, word: str) -> str:
        """Return its answer."""
        self.line.send(word.encode())
        return self.line.recv(65536).decode()


@pytest.fixture
def echo() -> Iterator[_Echo]:
    """A sealed gate."""
    with _echo() as one:
        yield one


@contextlib.contextmanager
def _echo(calls: Collection[str] = (), meter: int | None = None, counted: int = COUNTED) -> Iterator[_Echo]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(30)
        with process.start(_gate(theirs.fileno(), calls=calls, meter=meter, counted=counted)) as started:
            theirs.close()
            started.ready(60)
            yield _Echo(started, ours)


def test_it_holds_nothing(echo: _Echo) -> None:
    status = dict(line.split(":\t", 1) for line in echo.ask("status").splitlines() if ":\t" in line)
    assert [status[name].split() for name in ("Uid", "Gid")] == [[str(UID)] * 4] * 2
    assert status["Groups"].strip() == ""
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"], status["Threads"]) == ("1", "2", "1")
    pid = echo.started.pid
    # An empty network of its own; stdio, the agent's line, the reports, and three of the test module's own.
    assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    assert len(Path(f"/proc/{pid}/net/dev").read_text().splitlines()) == 3
    assert len(os.listdir(f"/proc/{pid}/fd")) == 8


def test_it_can_do_nothing_but_serve(echo: _Echo) -> None:
    assert echo.ask("plan") == "a word"
    refused = {word: echo.ask(word) for word in (*PROBES, "own", "duplicate", "fastopen", "more")}
    assert set(refused.values()) == {"errno 1"}, refused
    assert (echo.ask("flags"), echo.ask("send")) == ("done", "done")


def test_handed_socket_cannot_connect_again() -> None:
    """A compromised gate has sockets of the host's namespace: a message may open no connection by one."""
    with _echo(calls={"sendmsg"}) as echo:
        assert (echo.ask("fastopen by sendmsg"), echo.ask("sendmsg")) == ("errno 1", "done")


def test_counter_of_credits_goes_forwards_alone() -> None:
    with contextlib.ExitStack() as stack:
        meter = credit_meter.create(stack)
        credit_meter.add(meter, 7)
        echo = stack.enter_context(_echo(meter=meter))
        assert [echo.ask(word) for word in ("read", "add", "read")] == ["7", "12", "12"]
        for word in ("take away", "take all", "begin again", "end"):
            assert echo.ask(word) == "errno 1"
        assert credit_meter.spent(meter) == 12
        # A gate that adds all that it can takes no other run's count away.
        credit_meter.add(meter, 2**63)
        credit_meter.add(meter, 1)
        assert credit_meter.spent(meter) == 2**63 - 1


def test_same_is_possible_without_seal() -> None:
    """The control: each of these probes succeeds in an ordinary process (exec and fork are ordinary enough)."""
    os.close(os.open("/etc/passwd", os.O_RDONLY))
    socket.socket().close()
    os.kill(os.getppid(), 0)
    os.close(os.memfd_create("x"))


def test_what_it_refuses_is_told(echo: _Echo) -> None:
    told: list[denials.Denial] = []
    watches = dict(echo.started.watches(told.append))
    (reports,) = watches.keys() - {echo.started.pidfd}
    assert watches[reports]() is None
    echo.ask("report")
    assert select.select([reports], [], [], 30)[0]
    assert watches[reports]() is None
    assert told == [denials.Denial("dns", "name.example", "refused")]


def test_what_it_refuses_in_last_moment_is_told() -> None:
    told: list[denials.Denial] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, process.start(_gate(theirs.fileno())) as started:
        started.ready(60)
        started.watches(told.append)
        _Echo(started, ours).ask("report")
        assert told == []
    assert told == [denials.Denial("dns", "name.example", "refused")]


def test_its_end_is_error(echo: _Echo) -> None:
    watches = echo.started.watches(lambda _: None)
    echo.line.send(b"die")
    assert select.select([echo.started.pidfd], [], [], 30)[0]
    error = watches[echo.started.pidfd]()
    assert isinstance(error, errors.GateError)
    assert str(error) == "the dns gate ended: told to"


def test_gate_that_cannot_start_says_why() -> None:
    gate = process.start(_gate(0, "tests.kernel.there_is_none"))
    with gate as started, pytest.raises(errors.KernelError, match=r"did not start: .*there_is_none"):
        started.ready(60)


def test_it_ends_with_block(echo: _Echo) -> None:
    with process.start(_gate(echo.line.fileno())) as started:
        started.ready(60)
        pid = started.pid
    assert not Path(f"/proc/{pid}").exists()


def test_gate_that_reports_without_end_is_ended(echo: _Echo) -> None:
    told: list[denials.Denial] = []
    watches = dict(echo.started.watches(told.append))
    (reports,) = watches.keys() - {echo.started.pidfd}
    echo.ask("flood")  # past the bound that an honest gate holds itself to
    error = None
    for _ in range(1000):
        if not select.select([reports], [], [], 5)[0]:
            break
        error = error or watches[reports]()
        if error is not None:
            break
        echo.ask("flood")
    assert isinstance(error, errors.GateError)
    assert len(told) < 5000


def test_gate_that_reports_nonsense_is_ended(echo: _Echo) -> None:
    watches = dict(echo.started.watches(lambda _: None))
    (reports,) = watches.keys() - {echo.started.pidfd}
    echo.ask("nonsense")
    assert select.select([reports], [], [], 30)[0]
    assert isinstance(watches[reports](), errors.GateError)


@pytest.mark.parametrize("how", ["reports", "dies", "sleeps", "lies"])
def test_last_destinations_are_all_told_or_said_to_be_lost(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A gate that ends, says that it is done too early, or does not answer in time has not told all."""
    monkeypatch.setattr(process, "_LAST_SECONDS", 30 if how != "sleeps" else 1)
    told: dict[str, tuple[int, int | None]] = {}

    def reached(target: str, connections: int, carried: int | None) -> None:
        told[target] = connections, carried

    with _echo() as echo:
        watches = dict(echo.started.watches(lambda _: None, reached=reached))
        echo.line.send(f"last {how}".encode())
        if how == "lies":
            (reports,) = watches.keys() - {echo.started.pidfd}
            assert select.select([reports], [], [], 30)[0]
            assert isinstance(watches[reports](), errors.GateError)
        assert echo.started.tell_last() is (how == "reports")
    assert len(told) == {"reports": COUNTED, "dies": 1}.get(how, 0)


def test_reports_of_gate_that_is_gone_are_read() -> None:
    """It has not read what asked it to end: to its supervisor that is an error before the first of its reports."""
    told: list[str] = []
    with _echo(counted=100) as echo:

        def reached(target: str, connections: int, carried: int | None) -> None:
            told.append(target)
            assert select.select([echo.started.pidfd], [], [], 30)[0]

        echo.started.watches(lambda _: None, reached=reached)
        echo.line.send(b"last reports")
        assert echo.started.tell_last()
    assert len(told) == 100


def test_gate_that_counts_nothing_has_told_all(echo: _Echo) -> None:
    echo.started.watches(lambda _: None)
    assert echo.started.tell_last()
    assert echo.ask("plan") == "a word"


def test_gate_that_writes_without_end_is_ended(echo: _Echo) -> None:
    """Its last words are bounded: it closed its reports, is alive, and fills the pipe as fast as it is read."""
    watches = dict(echo.started.watches(lambda _: None))
    (reports,) = watches.keys() - {echo.started.pidfd}
    echo.line.send(b"last shouts")
    assert select.select([reports], [], [], 30)[0]
    error = watches[reports]()
    assert isinstance(error, errors.GateError)
    assert len(str(error)) < 8192


@pytest.fixture
def ahead() -> Iterator[prefork.Kind]:
    """The kind of the echo gate, of which one waits."""
    prefork.drop()
    before = sorted(os.listdir("/proc/self/fd"))
    kind = _gate(0).kind
    prefork.ahead([kind])
    yield kind
    prefork.drop()
    assert sorted(os.listdir("/proc/self/fd")) == before


def _waiting(kind: prefork.Kind) -> int:
    return prefork._own.waiting[kind].child.pid


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_one_that_was_begun_ahead_serves_one_run_and_ends_with_it(ahead: prefork.Kind) -> None:
    first = _waiting(ahead)
    prefork.ahead([ahead])  # one is enough
    assert _waiting(ahead) == first
    with _echo() as echo:
        assert echo.started.pid == first
        assert echo.ask("plan") == "a word"
    assert _is_gone(first)
    with _echo() as echo:
        assert echo.started.pid != first


def test_one_that_was_begun_ahead_holds_nothing_and_is_nowhere(ahead: prefork.Kind) -> None:
    pid = _waiting(ahead)
    # Its three pipes and the socket that it listens on, and two of the test module's own: it waits then.
    until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 6)
    assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def test_one_that_was_killed_while_it_waited_is_not_taken(ahead: prefork.Kind) -> None:
    first = _waiting(ahead)
    os.kill(first, signal.SIGKILL)
    until(lambda: not prefork._own.waiting[ahead].lives())
    with _echo() as echo:
        assert echo.started.pid != first
        assert echo.ask("plan") == "a word"
    assert _is_gone(first)


def test_one_that_nobody_needed_ends(ahead: prefork.Kind) -> None:
    first = _waiting(ahead)
    prefork.drop()
    assert _is_gone(first)


def test_one_of_another_thread_is_not_taken(ahead: prefork.Kind) -> None:
    """The kernel would end it with that thread, and the run with it."""
    pids: list[int] = []

    def elsewhere() -> None:
        with _echo() as echo:
            pids.append(echo.started.pid)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert pids != [_waiting(ahead)]
    assert not _is_gone(_waiting(ahead))
