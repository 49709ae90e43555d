"""Check parts of the service without a service: the cost of a request, the filter, and the clients' socket paths."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import data, errors, json_bounds
from policy.decompile import bpf
from sandbox import unix_wire
from sandbox.audit.run_report import RunReport
from sandbox.run_result import RunResult
from sandbox.serve import hardening, systemd
from sandbox.serve.api import client, paths, protocol, rlimits, run, session
from tests.unit.sandbox import forked

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_EPERM = 0x00050000 | errno.EPERM


def test_memory_is_bounded_while_it_lasts_and_then_no_more() -> None:
    # A fresh interpreter: a test runner's own free memory would need nothing from the kernel.
    program = (
        "import json, resource\nfrom policy import errors\nfrom sandbox.serve.api import rlimits as bounds\n"
        "before = resource.getrlimit(resource.RLIMIT_DATA)\n"
        "try:\n"
        "    with bounds.memory(16 << 20):\n"
        "        bytearray(64 << 20)\n"
        "except errors.RequestError as e:\n"
        "    said = e.code\n"
        "else:\n"
        "    said = 'it could'\n"
        "with bounds.memory(128 << 20):\n"
        "    bytearray(64 << 20)\n"
        "same = before == resource.getrlimit(resource.RLIMIT_DATA)\n"
        "print(json.dumps([said, same, len(bytearray(64 << 20))]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout) == ["bad_request", True, 64 << 20]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kind": "run", "x": [' + b"{}," * 1_300_000 + b"{}]}",
        b'{"kind": "ps", ' + b",".join(b'"%d":0' % n for n in range(300_000)) + b"}",
        b'{"kind": "ps", ' + b",".join(b'"%d":"\xf0\x9f\x98\x80"' % n for n in range(200_000)) + b"}",
        b"[" * 4_000_000,
        b'["' + b'","' * 1_300_000,
    ],
    ids=["objects", "keys", "wide", "deep", "quotes"],
)
def test_request_of_too_many_values_gets_code(raw: bytes) -> None:
    assert len(raw) <= unix_wire.REQUEST_BYTES

    # A fresh interpreter, like the supervisor's shims: a test runner has gigabytes of free memory of its own.
    program = (
        "import sys\nfrom policy import errors\nfrom sandbox.serve.api import protocol, rlimits as bounds\n"
        "raw = sys.stdin.buffer.read()\n"
        "try:\n"
        "    with bounds.memory(bounds.REQUEST_MEMORY):\n"
        "        protocol.parse(raw)\n"
        "except errors.RequestError as e:\n"
        "    print(e.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=raw, capture_output=True, timeout=120)
    assert done.returncode == 0, done
    assert done.stdout.decode() == f"the request is refused: made of more than {json_bounds.REQUEST_VALUES} values\n"


def test_largest_intent_fits_into_request() -> None:
    text = "\N{GREEK SMALL LETTER ALPHA}" * (512 * 1024 - 200)
    frame = unix_wire.encode({"kind": "run", "text": text, "timeout_ms": 1})
    assert len(frame) < unix_wire.REQUEST_BYTES

    def look() -> Any:
        with rlimits.memory(rlimits.REQUEST_MEMORY):
            return getattr(protocol.parse(frame[4:]), "text", "") == text

    assert forked.returned(look) is True


def test_block_ends_in_time_also_while_it_waits() -> None:
    reader, writer = os.pipe()
    try:
        begin = time.monotonic()
        with pytest.raises(errors.RequestError, match=r"reading took longer than 0\.1 s"):  # noqa: SIM117
            with rlimits.seconds(0.1, "reading", "a file system"):
                os.read(reader, 1)
        assert time.monotonic() - begin < 30
        with rlimits.seconds(30, "nothing", "a file system"):
            pass
    finally:
        os.close(reader)
        os.close(writer)


def test_packages_of_one_user_take_turns_and_of_two_do_not(tmp_path: Path) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with rlimits.turn(tmp_path, 1000, 5):
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(30)
        with pytest.raises(errors.BusyError), rlimits.turn(tmp_path, 1000, 0.05):
            pass
        with rlimits.turn(tmp_path, 1001, 0.05):
            pass
    finally:
        release.set()
        thread.join()
    with rlimits.turn(tmp_path, 1000, 0.05):
        pass


def test_what_is_read_in_callers_name_is_bounded_in_every_keeper(tmp_path: Path) -> None:
    def look() -> Any:
        caller = SimpleNamespace(uid=1000, rights=contextlib.nullcontext)
        own = SimpleNamespace(path=tmp_path, config=SimpleNamespace(request_seconds=3))
        session, said = SimpleNamespace(caller=caller), []
        silent, _ = os.pipe()

        def two() -> None:
            with rlimits.turn(tmp_path, 1000, 0.01):
                pass

        for act in (two, lambda: os.read(silent, 1), lambda: bytearray(2 * rlimits.PACKAGE_MEMORY)):
            try:
                with run.in_their_name(cast("Any", session), cast("Any", own), "a file system"):
                    act()
            except errors.CovenantError as e:
                said.append(e.code)
        return said

    assert forked.returned(look) == ["too_many_requests", "bad_request", "bad_request"]


def _named(path: Path, uid: int = 1000) -> str:
    session = cast("Any", SimpleNamespace(caller=SimpleNamespace(display=f"uid{uid}@local")))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return run.name_of(fd, session)
    finally:
        os.close(fd)


def test_package_has_name_of_its_place_and_what_is_not_printed_in_it_is_escaped(tmp_path: Path) -> None:
    assert _named(tmp_path) == str(tmp_path)
    hostile = tmp_path / os.fsdecode(b"a\x1b[2J\nrun_ended \xff\xe2\x80\xaeb\\n")
    hostile.mkdir()
    name = _named(hostile)
    assert name == f"{tmp_path}/a\\x1b[2J\\nrun_ended \\udcff\\u202eb\\\\n"
    assert name.isprintable()


def test_name_not_that_of_directory_here_is_nobody_elses(tmp_path: Path) -> None:
    """For a removed directory the kernel returns a name that its author chose, which may be another directory here."""
    (tmp_path / "gone").mkdir()
    fd = os.open(tmp_path / "gone", os.O_RDONLY | os.O_DIRECTORY)
    (tmp_path / "gone").rmdir()
    try:
        for path in ("gone", "gone (deleted)"):  # the control: another directory has either name
            (tmp_path / path).mkdir(exist_ok=True)
        session = cast("Any", SimpleNamespace(caller=SimpleNamespace(display="uid7@local")))
        assert run.name_of(fd, session) == f"uid7@local:{tmp_path}/gone (deleted)"
    finally:
        os.close(fd)


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_filter_refuses_deny_list_but_what_is_needed(arch: str) -> None:
    program = hardening.program(arch)
    numbers = data.syscalls(arch).numbers

    def says(name: str, *arguments: int, tag: int = _AUDIT[arch]) -> int:
        return bpf.decide(program, number=numbers[name], arch=tag, arguments=arguments)

    refused = hardening.refused()
    found = {name: says(name) for name in numbers if name != "bpf"}
    assert {name for name, answer in found.items() if answer == _EPERM} == refused & numbers.keys()
    assert {answer for name, answer in found.items() if name not in refused} == {bpf.ALLOW}
    # One command of bpf(2) alone, for any value in the half of the argument that the kernel ignores.
    assert [says("bpf", command) for command in (16, 1 << 32 | 16)] == [bpf.ALLOW] * 2
    assert {says("bpf", command) for command in (*range(16), *range(17, 64), 1 << 32)} == {_EPERM}
    assert says("read", tag=0x40000003) == _EPERM
    if arch == "x86_64":
        assert bpf.decide(program, number=0x40000000, arch=_AUDIT[arch]) == _EPERM


def test_what_is_needed_is_on_deny_list() -> None:
    """An exception to a call that the deny list does not contain would be dead text."""
    assert set(hardening.NEEDED) <= set(data.deny().names)
    known = {"kexec_load", "init_module", "reboot", "settimeofday", "swapon", "keyctl", "io_uring_setup", "userfaultfd",
             "perf_event_open", "open_by_handle_at", "fanotify_init"}  # fmt: skip
    assert known <= hardening.refused()


@pytest.mark.parametrize(
    ("state", "given", "root", "found"),
    [
        ("/var/lib/covenant", True, True, ["/run/covenant/supervisor.sock"]),
        ("/home/x/.covenant/supervisor", True, True, ["/home/x/.covenant/supervisor/supervisor.sock"]),
        ("/r/s", False, True, ["/r/s/supervisor.sock", "/run/covenant/supervisor.sock"]),
        ("/r/s", True, False, ["/r/s/supervisor.sock", "/run/covenant/supervisor.sock"]),
    ],
)
def test_clients_look_where_state_says(
    state: str, given: bool, root: bool, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    assert client.candidates(state, given=given) == found
    assert found[0] == paths.socket_of(state)


def test_client_finds_nobody_where_nobody_is(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "no" / "directory"):
        with client.connected(str(path)) as sock:
            assert sock is None
    left = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    with client.connected(str(left)) as sock:
        assert sock is None


@pytest.mark.parametrize(
    "said", [b"", b"\0\0\0", b"\0\0\0\2[]", b"\0\0\0\1x", b"\xff\xff\xff\xff", b"\0\0\0\x02{}\0\0\0\x00"]
)
def test_what_does_not_speak_as_supervisor_is_error(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        if said.startswith(b"\0\0\0\x02{}"):
            assert client.ask(ours, "ps") == {}
        else:
            with pytest.raises(errors.ServiceError):
                client.ask(ours, "ps")


def test_error_of_code_unknown_is_one_all_same() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(unix_wire.encode({"kind": "error", "code": "of_tomorrow", "message": "no"}))
        with pytest.raises(errors.CovenantError, match="no"):
            client.ask(ours, "ps")


def test_answer_none_of_run_is_error() -> None:
    with pytest.raises(errors.ServiceError):
        RunResult.from_json({"kind": "answer", "run_id": "x"})


def test_systemd_is_told_and_listener_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LISTEN_PID", "LISTEN_FDS", "WATCHDOG_USEC", "NOTIFY_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    assert systemd.listener() is None
    assert systemd.watchdog_seconds() == 30
    systemd.say("READY=1")
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    assert systemd.watchdog_seconds() == 1
    # The variable is another process's, which passed on its environment.
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert systemd.watchdog_seconds() == 30
    monkeypatch.setenv("LISTEN_PID", "1")
    assert systemd.listener() is None
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with pytest.raises(ValueError, match="more than one"):
        systemd.listener()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        for _ in range(50):  # more than the queue holds: the sender does not wait for the reader
            systemd.say("READY=1")
        assert told.recv(100) == b"READY=1"


def test_what_cannot_be_taken_away_of_another_run_loses_nobody_their_answer(tmp_path: Path) -> None:
    told: list[Any] = []

    class Own:
        path, ledger = tmp_path, SimpleNamespace(public_key=Ed25519PrivateKey.generate().public_key())

        def recover(self) -> None:
            raise OSError(errno.EBUSY, "a directory of a run is in use")

    report_reader = SimpleNamespace(read=RunReport, lost={"a-run-whose-keeper-was-killed"})
    run.send_report(cast("Any", SimpleNamespace(send_rows=told.append)), cast("Any", Own()), cast("Any", report_reader))
    assert [document["kind"] for document in told] == ["rows"]


def test_line_of_daemon_is_unix_stream(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    datagrams, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs, datagrams, other, socket.socket() as tcp, (tmp_path / "f").open("w") as place:
        fds = [theirs.fileno(), datagrams.fileno(), tcp.fileno(), place.fileno()]
        made = session.Session(ours, cast("Any", None), cast("Any", None), fds=fds)
        assert made.line(0) == theirs.fileno()
        for index in (1, 2, 3):
            with pytest.raises(errors.RequestError, match=f"descriptor {index} is no Unix socket"):
                made.line(index)


def test_request_with_daemons_tools_has_one_descriptor_more() -> None:
    plain = {"kind": "run", "text": "a"}
    for more, count in (({}, 1), ({"daemon_tools": []}, 2), ({"daemon_tools": ["a"], "workspace": True}, 3)):
        asked = protocol.parse(json.dumps({**plain, **more}).encode())
        assert asked.descriptors == count
    with pytest.raises(errors.CovenantError):
        protocol.parse(json.dumps({**plain, "daemon_tools": [""]}).encode())
