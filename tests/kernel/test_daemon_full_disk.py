"""Each store of the daemon on a full disk, and with no descriptors left.

The client is told, and reads go on. When there is room again, and after a kill, every acknowledged change is there.
Each store's directory is a small tmpfs in a mount namespace of the test's own. The daemon is a user without rights.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from covenant.wire import client
from policy import errors
from tests import full_disk, runtime_kit
from tests.capability_kit import ADA
from tests.kernel import serving
from tests.kernel.serving import CALLER
from tests.kernel.world import SLOWNESS
from tests.supervisor_double import SupervisorDouble

START_SECONDS: Final = 60 * SLOWNESS
# How much each place has: "." is the home itself, with memory.db.
PLACES: Final = {".": 32, "audit": 24, "capabilities": 1, "peers": 1, "a2a": 1, "receipts": 1, "budget": 1}
TURNS: Final = 2000
GRANTS: Final = ("memory.read", "memory.write", "tool.call.echo", "chain.receipts")
RICH, POOR = "rich", "poor"
# Holds the mounts until it is killed.
_HOLD: Final = """
set -e
mount --make-rprivate /
for place in $PLACES; do
  name="${place%%:*}"
  mkdir -p "$HOME_DIR/$name"
  mount -t tmpfs -o "mode=700,uid=$UID_OF,gid=$UID_OF,size=${place##*:}m" tmpfs "$HOME_DIR/$name"
done
echo ready
exec sleep infinity
"""


class Disk:
    """The daemon's home in its mount namespace, and the daemon, which may be killed and started again."""

    def __init__(self, base: Path, supervisor: Path) -> None:
        self._home, self._supervisor = base / "home", supervisor
        self._log = (base / "log").open("ab")
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Disk:
        self._home.mkdir(mode=0o755)
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME_DIR": str(self._home),
            "UID_OF": str(CALLER),
            "PLACES": " ".join(f"{name}:{size}" for name, size in PLACES.items()),
        }
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", _HOLD], env=environment, stdout=subprocess.PIPE, stderr=self._log
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n", self.log
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._holder.kill()
        self._holder.communicate()
        self._log.close()

    @property
    def home(self) -> Path:
        """As this process reaches it."""
        return Path(f"/proc/{self._holder.pid}/root{self._home}")

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    @property
    def pid(self) -> int:
        assert self._daemon is not None
        return self._daemon.pid

    def start(self) -> None:
        """Start the daemon, and wait until it answers."""
        code = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from covenant.start import entry; entry()"
        enter = ["nsenter", "-t", str(self._holder.pid), "-m"]
        own = ["--reuid", str(CALLER), "--regid", str(CALLER), "--clear-groups"]
        self._daemon = subprocess.Popen(
            [*enter, "setpriv", *own, "/usr/bin/python3", "-c", code, serving.covenant_command()[3]],
            env={
                "PATH": "/usr/bin:/bin",
                "COVENANT_HOME": str(self._home),
                "COVENANT_HTTP_PORT": "off",
                "COVENANT_SOCKET": str(self._supervisor),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(errors.DaemonSilentError), client.connected(self.home) as one:
                one.ask("ping")
                return
            assert self._daemon.poll() is None, self.log
            assert time.monotonic() < until, self.log
            time.sleep(0.02)

    def kill(self) -> None:
        """As a crash does."""
        if self._daemon is not None:
            self._daemon.send_signal(signal.SIGKILL)
            self._daemon.wait()

    def descriptors(self, most: int | None) -> None:
        """How many it may have open from now on; None for as many as at its start."""
        (line,) = (one for one in Path(f"/proc/{self.pid}/limits").read_text().splitlines() if "open files" in one)
        hard = line.split()[4]
        command = ["prlimit", "--pid", str(self.pid), f"--nofile={most or hard}:{hard}"]
        subprocess.run(command, check=True, capture_output=True, **serving.identity(CALLER))


class Case(NamedTuple):
    """Where there is no room; what is asked, again and again, and gives what was acknowledged; what is there of it."""

    place: str
    act: Callable[[client.Client], str]
    there: Callable[[client.Client], set[str]]


def _grant(one: client.Client) -> str:
    action = f"tool.call.t{uuid.uuid4().hex}"
    return str(one.ask("grant_capability", action=action, scope={})["signature_b58"])


def _grants(one: client.Client) -> set[str]:
    return {
        grant["signature_b58"]
        for grant in one.ask("capability_usage", limit=5000)["grants"]
        if grant["effective"] == "live"
    }


def _revoke(one: client.Client) -> str:
    """The name of a right that is no more: of the ones that are there the first that the test made."""
    made = next(
        grant["signature_b58"]
        for grant in one.ask("capability_usage", limit=5000)["grants"]
        if grant["effective"] == "live" and grant["action"].startswith("tool.call.t")
    )
    one.ask("revoke_capability", signature_b58=made)
    return str(made)


def _revoked(one: client.Client) -> set[str]:
    return {grant["signature_b58"] for grant in one.ask("capability_usage", limit=5000)["grants"] if grant["revoked"]}


def _use(one: client.Client) -> str:
    one.ask("call_tool", name="echo", arguments={"text": "x"})
    return str(_used(one))


def _used(one: client.Client) -> int:
    grants = one.ask("capability_usage", limit=5000)["grants"]
    (budget,) = [grant["budget"] for grant in grants if grant["action"] == "tool.call.echo" and grant.get("budget")]
    return int(budget["used"])


def _uses(one: client.Client) -> set[str]:
    return {str(number) for number in range(1, _used(one) + 1)}


def _enrol(one: client.Client) -> str:
    made = one.ask("enroll_peer", display=ADA.display, pubkey=ADA.pubkey)
    return str(made["token_b58"])[:6]


def _peers(one: client.Client) -> set[str]:
    found = one.ask("list_peers", limit=5000)
    assert not found["truncated"]
    return {peer["token_prefix"] for peer in found["peers"]}


def _put(one: client.Client) -> str:
    return str(one.ask("put_memory", tier="longterm", text="t" * 20_000)["record"]["id"])


def _records(one: client.Client) -> set[str]:
    return {record["id"] for record in one.ask("recent_memory", tier="longterm", limit=300)["records"]}


def _intent(one: client.Client) -> str:
    return str(one.ask("submit_intent", text="zzz", agent=RICH)["intent_id"])


def _wait(one: client.Client) -> str:
    """Return the id of an intent that waits for credits, as its client is told."""
    with pytest.raises(errors.CovenantError) as raised:
        one.ask("submit_intent", text="zzz", agent=POOR)
    if not isinstance(raised.value, errors.BudgetExhaustedError):
        raise raised.value
    return raised.value.hint.split()[-1]


def _waiting(one: client.Client) -> set[str]:
    """Those that can be resumed, for which there are no credits yet; of what is not kept it would be said so."""
    rows = one.ask("recent_audit", extended=True, limit=5000)["events"]
    found = {row["kind"]["intent_id"] for row in rows if row["kind"]["type"] == "budget_exhausted"}
    for intent_id in found:
        with pytest.raises(errors.BudgetExhaustedError):
            one.ask("resume_intent", intent_id=intent_id)
    return found


def _intents(one: client.Client) -> set[str]:
    rows = one.ask("recent_audit", extended=True, limit=5000)["events"]
    # One whose answer was kept and whose receipt of that was not is answered too, and its row says so (`not_stored`).
    ended = {row["kind"]["intent_id"] for row in rows if row["kind"]["type"] == "intent_dispatched"}
    for intent_id in ended:
        assert one.ask("get_intent_result", intent_id=intent_id)["text"]
    return ended


def _send(one: client.Client) -> str:
    owner = {"display": ADA.display, "pubkey": ADA.pubkey}
    task = {"id": str(uuid.uuid4()), "sender": _self(one), "recipient": owner, "intent_text": "x" * 400}
    return str(one.ask("send_a2_a_task", task=task)["task_id"])


def _self(one: client.Client) -> dict[str, Any]:
    return dict(one.ask("recent_capabilities", limit=1)["capabilities"][0]["capability"]["granted_by"])


def _tasks(one: client.Client) -> set[str]:
    return {entry["task"]["id"] for entry in one.ask("a2_a_queue", limit=5000)["tasks"]}


CASES: Final = {
    "audit": Case("audit", _grant, _grants),
    "grant": Case("capabilities", _grant, _grants),
    "revoke": Case("capabilities", _revoke, _revoked),
    "uses": Case("capabilities", _use, _uses),
    "peers": Case("peers", _enrol, _peers),
    "memory": Case(".", _put, _records),
    "mailbox": Case("a2a", _send, _tasks),
    "receipts": Case("receipts", _intent, _intents),
    "budget": Case("budget", _intent, _intents),
    "checkpoints": Case("budget", _wait, _waiting),
}


@pytest.fixture(scope="module")
def disk() -> Iterator[Disk]:
    """A daemon with what the cases need, and room for it."""
    with serving.open_place() as base, SupervisorDouble(base / "s.sock"), Disk(base, base / "s.sock") as one:
        (base / "s.sock").chmod(0o666)
        for name, credits_an_hour in ((RICH, 1_000_000), (POOR, 1)):
            runtime_kit.package(one.home, name, budget=credits_an_hour)
        for path in (one.home / "agents", *(one.home / "agents").rglob("*")):
            os.chown(path, CALLER, CALLER)
        one.start()
        with client.connected(one.home) as asking:
            for action in GRANTS:
                scope = {"version": 1, "max_uses": 100_000} if action == "tool.call.echo" else {}
                asking.ask("grant_capability", action=action, scope=scope)
            asking.ask("grant_capability", action=f"a2a.send.{ADA.pubkey}", scope={})
            asking.ask("submit_intent", text="the one credit", agent=POOR)
            made = asking.ask("enroll_peer", display=ADA.display, pubkey=ADA.pubkey)
            own = _self(asking)["pubkey"]
            asking.ask("grant_capability", action=f"a2a.recv.{own}", scope={}, subject=ADA.pubkey)
            assert made["token_b58"]
        yield one


def _reads(one: client.Client) -> None:
    """Make the requests that write to no store."""
    for kind, fields in (
        ("ping", {}),
        ("recent_memory", {"limit": 5}),
        ("recent_capabilities", {"limit": 5}),
        ("recent_audit", {"limit": 5}),
        ("list_agents", {}),
        ("a2_a_queue", {"limit": 5}),
        ("recent_debits", {"limit": 5}),
        ("recent_receipts", {"limit": 5}),
    ):
        assert one.ask(kind, **fields)["kind"] != "error"


def test_with_no_descriptors_left_reads_go_on_and_who_comes_next_is_served_later(disk: Disk) -> None:
    with client.connected(disk.home) as one:
        # What reads keep open is open; as many as that, and none more.
        _reads(one)
        known = {_put(one)}
        here = max(map(int, os.listdir(f"/proc/{disk.pid}/fd"))) + 1
        disk.descriptors(here)
        try:
            with contextlib.ExitStack() as stack:
                # Some take what is left, the others wait in the kernel's queue.
                for _ in range(here):
                    stack.enter_context(client.opened(disk.home))
                _reads(one)
                for act, there in ((_put, _records), (_grant, _grants), (_enrol, _peers), (_send, _tasks)):
                    assert act(one) in there(one)
                until = time.monotonic() + START_SECONDS
                while len(os.listdir(f"/proc/{disk.pid}/fd")) < here:
                    assert time.monotonic() < until
                    time.sleep(0.02)
                # A run needs descriptors of its own: its package, and a connection to the supervisor.
                with pytest.raises(errors.CovenantError, match=os.strerror(errno.EMFILE)):
                    _intent(one)
        finally:
            disk.descriptors(None)
        known |= {_put(one)}
        assert known <= _records(one)
    # The listener goes on, by itself.
    with client.connected(disk.home, answer_seconds=START_SECONDS) as another:
        assert another.ask("ping")["kind"] == "pong"
        assert another.ask("verify_audit_integrity")["report"]["valid"] is True


@pytest.mark.parametrize("name", CASES)
def test_full_disk_is_told_and_loses_nothing(name: str, disk: Disk) -> None:
    case = CASES[name]
    known: set[str] = set()
    with client.connected(disk.home) as one:
        for _ in range(60 if name == "revoke" else 0):
            _grant(one)
        known.add(case.act(one))
        with full_disk.filled(disk.home / case.place):
            for _ in range(TURNS):
                try:
                    known.add(case.act(one))
                except errors.CovenantError as e:
                    refused = e
                    break
            else:
                raise AssertionError(f"{len(known)} acts, and none was refused")
            assert refused.code in (errors.StoreFullError.code, errors.MemoryStoreError.code), (refused, disk.log)
            assert any(word in str(refused) for word in (os.strerror(errno.ENOSPC), "disk is full")), refused
            assert refused.hint
            # Again and again: one that was refused leaves the store as it was.
            with pytest.raises(errors.CovenantError):
                case.act(one)
            if case.place != "audit":
                _reads(one)
            assert known <= case.there(one)
        known.add(case.act(one))
        _reads(one)
    disk.kill()
    disk.start()
    with client.connected(disk.home) as one:
        assert known <= case.there(one)
        assert one.ask("verify_audit_integrity")["report"]["valid"] is True
        assert known | {case.act(one)} <= case.there(one)
