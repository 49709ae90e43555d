"""The acts of the year: how often an operator, time or an accident does each, and the checks of each."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from covenant.wire import client
from policy import errors
from tests import cli_kit
from tests.capability_kit import ADA
from tests.crash.campaign import verified
from tests.year.clock import DAY_MS, HOUR_MS, Clock, now_ms
from tests.year.intents import Intents
from tests.year.machine import AGENTS, Machine

ACTIONS: Final = ("memory.read", "memory.write", "memory.purge", "audit.purge", "capabilities.purge", "peers.purge")
REAL: Final = ("worker", "warm")


class Grant(NamedTuple):
    """A grant of the operator's to a peer, until a time."""

    token: str
    ends_ms: int


class Year:
    """State of the year beside the machine's: the operator's newest key, what expires, and what was wrong."""

    def __init__(self, machine: Machine, clock: Clock, intents: Intents, chance: random.Random, *, days: int) -> None:
        self.machine, self.clock, self.intents, self.chance = machine, clock, intents, chance
        self.month_days = max(1, days // 12) if days >= 120 else max(1, days // 4)
        # Longer than it takes until the next renewal, wherever the calendar puts that.
        self._term_days = max(3 * self.month_days, longest_gap(Year.renew_packages, days))
        self._root_days = max(8 * self.month_days, longest_gap(Year.renew_root, days))
        self.key = "operator-0"
        self.wrong = intents.wrong
        self.counts: dict[str, int] = {}
        self.checks: dict[str, int] = {}
        self.archives: list[Path] = []
        self._grants: list[Grant] = []
        self._keys = 0
        self._lapses_ms = 0

    def do(self, act: Callable[[Year], None]) -> None:
        """Do one act. An error of it is a finding, and the year goes on."""
        name = act.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        try:
            act(self)
        except (AssertionError, OSError, errors.CovenantError) as e:
            self.expect(False, f"{name}: {type(e).__name__}: {str(e)[-1500:]}")
            if not self.machine.answers():
                self.machine.kill_daemon()
                self.machine.start_daemon()

    # --- before the first day ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Make keys, trust root, packages and grants, and start both processes."""
        cli_kit.done("keys", "new", self.key, "--no-passphrase")
        cli_kit.done("trust", "init", "--key", self.key, "--expires", f"{self._root_days}d")
        self.machine.agents(self.key, self._term)
        self._lapses_ms = now_ms() + self._term_days * DAY_MS
        self.machine.served.start()
        self.machine.start_daemon()
        for action in ACTIONS:
            self.machine.ask("grant_capability", action=action, scope={})

    @property
    def _term(self) -> str:
        return f"{self._term_days}d"

    # --- checks -----------------------------------------------------------------------------------------

    def expect(self, holds: bool, finding: str) -> None:
        """Note a finding unless it holds."""
        if not holds:
            day = self.clock.offset_ms / DAY_MS
            self.wrong.append(f"day {day:.1f}: {finding}")

    def _seen(self, what: str) -> None:
        self.checks[what] = self.checks.get(what, 0) + 1

    def refused(self, codes: tuple[str, ...], finding: str, ask: Callable[[], Any]) -> None:
        """Expect that a request is refused with one of these codes."""
        try:
            ask()
        except errors.CovenantError as e:
            self.expect(e.code in codes, f"{finding}: refused with `{e.code}`: {e}")
        else:
            self.expect(False, f"{finding}: not refused")

    def daily(self) -> None:
        """Expect that everything that has ended is refused, and nothing else."""
        for grant in list(self._grants):
            ended = now_ms() > grant.ends_ms
            try:
                with client.connected(self.machine.daemon_home, token=grant.token) as one:
                    one.ask("recent_memory", limit=1)
                self.expect(not ended, "a grant that has expired still holds")
            except errors.CovenantError as e:
                self.expect(ended, f"a grant that holds is refused: {e.code}: {e}")
            if ended:
                self._grants.remove(grant)
                self._seen("refusals of a grant that ended")
            else:
                self._seen("uses of a grant that holds")
        if self._lapses_ms and now_ms() > self._lapses_ms:
            codes = (errors.ExpiredError.code,)
            self.refused(codes, "a package whose signature has expired", lambda: self._intent("lapses"))
            self._seen("refusals of a package whose signature ended")
        elif self._lapses_ms:
            self.expect(self._intent("lapses")["status"] == "ok", "a package whose signature holds does not run")
            self._seen("runs of the package before its signature ended")

    def monthly(self) -> None:
        """Both logs verify, and the stores of the daemon agree."""
        report = self.machine.ask("verify_audit_integrity")["report"]
        self.expect(report["valid"] is True, f"the daemon's log does not verify: {report}")
        found = self.machine.ask("verify", window=1000)
        self.expect(not found["drift"], f"the stores disagree: {found['drift'][:3]}")

    def _token_refused(self, token: str, finding: str) -> None:
        home = self.machine.daemon_home
        with contextlib.suppress(errors.AuthenticationError), client.connected(home, token=token):
            self.expect(False, finding)

    def _intent(self, agent: str | None, text: str = "x") -> dict[str, Any]:
        return self.machine.ask("submit_intent", text=text, agent=agent)

    # --- acts of the operator ---------------------------------------------------------------------------

    def rotate_key(self) -> None:
        """Put a new key in the old one's place. Packages of the old one are refused until they are signed again."""
        self._keys += 1
        old, self.key = self.key, f"operator-{self._keys}"
        cli_kit.done("keys", "new", self.key, "--no-passphrase")
        both = ("--sign-with", old, "--sign-with", self.key)
        cli_kit.done(
            "trust", "rotate", old, "--to", self.key, "--name", self.key, "--revoke", "rotated", *both, "--yes"
        )
        codes = (errors.RevokedError.code, errors.UnknownKeyError.code)
        self.refused(codes, "a package of a key that was rotated away", lambda: self._intent("clerk"))
        self._sign_all()
        self.expect(self._intent("clerk")["status"] == "ok", "a package that the new key signed does not run")

    def _sign_all(self) -> None:
        for name in AGENTS:
            if name != "lapses":
                self.machine.sign(name, self.key, self._term)
        # It was signed by the key that is revoked now. It gets the new one's signature, and is never renewed.
        self.machine.sign("lapses", self.key, f"{self.month_days}d")
        self._lapses_ms = now_ms() + self.month_days * DAY_MS
        self.machine.ask("reload_agents")

    def renew_packages(self) -> None:
        """Renew every signature but one."""
        places = [self.machine.daemon_home / "agents" / name for name in AGENTS if name != "lapses"]
        cli_kit.done("manifest", "renew", *places, "--key", self.key, "--expires", self._term)
        self.machine.own_agents()
        self.machine.ask("reload_agents")

    def renew_root(self) -> None:
        """Let the trust root hold for longer."""
        cli_kit.done("trust", "renew", "--sign-with", self.key, "--expires", f"{self._root_days}d")

    def revoke_package(self) -> None:
        """Revoke a signed manifest. It is refused until it is signed again."""
        package = self.machine.daemon_home / "agents" / "worker"
        words = ("--reason", "it leaks", "--sign-with", self.key, "--yes")
        cli_kit.done("trust", "revoke", "--package", package, *words)
        self.refused((errors.RevokedError.code,), "a revoked package", lambda: self._intent("worker"))
        self.machine.sign("worker", self.key, self._term)
        self.machine.ask("reload_agents")
        self.expect(self._intent("worker")["status"] == "ok", "a package signed after a revocation does not run")

    def rotate_token(self) -> None:
        """Replace the operator's token."""
        token = client.operator_token(self.machine.daemon_home)
        self.machine.ask("rotate_operator_token")
        self._token_refused(token, "the old token of the operator is still accepted")

    def enroll(self) -> None:
        """Admit a peer with a grant that expires."""
        ends = now_ms() + self.month_days * DAY_MS // 2
        made = self.machine.ask(
            "enroll_peer", display=ADA.display, pubkey=ADA.pubkey, actions=["memory.read"], expires_at=ends
        )
        self._grants.append(Grant(made["token_b58"], ends))

    def revoke_peer(self) -> None:
        """Admit a peer and revoke it."""
        token = self.machine.ask("enroll_peer", display="bob@local", actions=["memory.read"])["token_b58"]
        self.machine.ask("revoke_peer", token_prefix=token[:6])
        self._token_refused(token, "a revoked peer is accepted")

    def purge(self) -> None:
        """Take out what is older than a month."""
        before = now_ms() - self.month_days * DAY_MS
        for kind in ("purge_memory", "purge_audit", "purge_capabilities", "purge_peers"):
            self.machine.ask(kind, before_ms=before)
        self.intents.forget(before)
        self.monthly()

    def archive(self) -> None:
        """Move the supervisor's rows that are older than a month into an archive, between two starts."""
        self.machine.stop_daemon()
        self.machine.served.stop()
        place = self.machine.base / "archives" / f"{len(self.archives)}"
        place.parent.mkdir(mode=0o700, exist_ok=True)
        made = cli_kit.document("audit", "archive", place, "--older-than", f"{self.month_days}d")
        if made["cut"]:
            self.archives.append(place)
            complaints = verified(place)
            self.expect(not complaints, f"an archive does not verify: {complaints}")
        self.machine.served.start()
        self.machine.start_daemon()

    def upgrade(self) -> None:
        """Stop both processes in order, and start them again."""
        self.machine.stop_daemon()
        status = self.machine.served.stop()
        self.expect(status in (0, -signal.SIGTERM), f"the supervisor ended with {status}")
        self.machine.served.start()
        self.machine.start_daemon()

    # --- accidents --------------------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        """Kill the daemon in the middle of a batch. What it acknowledged is there, and the rest can be asked again."""
        self.intents.batch(60, kill=self.machine.kill_daemon)
        self.machine.start_daemon()
        self.intents.again()
        self.monthly()

    def kill_supervisor(self) -> None:
        """Kill the supervisor in the middle of a run; the next one clears up."""
        asked = threading.Thread(target=self._run_that_is_killed)
        asked.start()
        time.sleep(self.chance.uniform(0.05, 0.4))
        self.machine.served.kill()
        asked.join()
        self.machine.served.start()
        self.expect(self._intent("worker")["status"] == "ok", "no run after the supervisor was killed")

    def _run_that_is_killed(self) -> None:
        with contextlib.suppress(errors.CovenantError):
            self._intent("worker")

    def full_daemon(self) -> None:
        """Fill the daemon's disk. Requests are refused, and what was acknowledged is there."""
        with self.machine.full("daemon"):
            refused = self._until_refused()
            self.expect(any(word in refused for word in ("disk is full", "No space left")), f"full disk: {refused}")
        self.intents.check(20)
        self.expect(self._intent("clerk")["status"] == "ok", "no intent after the disk had room again")
        self.monthly()

    def _until_refused(self) -> str:
        for _ in range(3000):
            try:
                self._intent(None, "z" * 2000)
                self.machine.ask("put_memory", tier="working", text="z" * 2000)
            except errors.CovenantError as e:
                return str(e)
        return "3000 intents, and none was refused"

    def full_supervisor(self) -> None:
        """Fill the supervisor's disk. Runs are refused, and the next one after it runs."""
        with self.machine.full("home/supervisor"), contextlib.suppress(errors.CovenantError):
            self._intent("worker")
            self._intent("worker")
        self.expect(self._intent("worker")["status"] == "ok", "no run after the disk had room again")

    def clock_ahead(self) -> None:
        """Let the clock be two months ahead once; the operator takes its records back."""
        ahead = 60 * DAY_MS
        self.clock.move(ahead)
        with contextlib.suppress(errors.CovenantError):
            self._intent("clerk")
        self.clock.move(-ahead)
        cli_kit.done("state", "clock", "--yes")
        self.machine.ask("set_clock")
        self._sign_all()
        self.expect(self._intent("worker")["status"] == "ok", "no run after a clock that was ahead was set right")
        self._grants.clear()

    def pass_time(self, hours: float) -> None:
        """Move the clock."""
        self.clock.move(int(hours * HOUR_MS))


# How often a year.
TIMES: Final[dict[Callable[[Year], None], int]] = {
    Year.enroll: 26,
    Year.revoke_peer: 12,
    Year.renew_packages: 12,
    Year.rotate_key: 4,
    Year.revoke_package: 4,
    Year.rotate_token: 6,
    Year.renew_root: 3,
    Year.purge: 12,
    Year.archive: 4,
    Year.upgrade: 6,
    Year.kill_daemon: 10,
    Year.kill_supervisor: 10,
    Year.full_daemon: 3,
    Year.full_supervisor: 3,
    Year.clock_ahead: 1,
}


def _count(act: Callable[[Year], None], days: int) -> int:
    """How often an act is done: at least once."""
    return max(1, round(TIMES[act] * days / 365))


def longest_gap(act: Callable[[Year], None], days: int) -> int:
    """Return the most days from the beginning or an act to the next one or the end (``calendar``)."""
    return 8 * days // (5 * _count(act, days)) + 2


def calendar(days: int, chance: random.Random) -> dict[int, list[Callable[[Year], None]]]:
    """Return the acts of each day: spread over the year, and each at least once."""
    found: dict[int, list[Callable[[Year], None]]] = {}
    for act in TIMES:
        count = _count(act, days)
        for number in range(count):
            day = min(days - 1, int((number + chance.uniform(0.2, 0.8)) * days / count))
            found.setdefault(day, []).append(act)
    return found
