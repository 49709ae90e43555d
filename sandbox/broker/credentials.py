"""Credentials of a running agent: a token once, then each granted secret by its name.

    {"id": 1, "kind": "token"}                                     {"id": 1, "ok": {"token": T, "expires_ms": 60000}}
    {"id": 2, "kind": "credential", "name": "github", "token": T}  {"id": 2, "ok": {"value": "...", "version": 3}}
    anything else of these two kinds                               {"id": 3, "error": {"code": "credential_refused"}}

The token is random, and the broker stores only its hash. The first request gets it, and it expires at the run's
deadline: a process that gets the descriptor later, without the token, gets no secret. Names are the effective ones, so
a child's names are also its parent's. A secret belongs to the agent id that requests it, so a child has its own.

All refusals have the same answer; the cause is a denial in the log. Timing: a request for a secret that is not granted
still does a vault lookup, under a name that cannot exist, so both kinds of refusal take equally long.

Each request reads the vault: a rotation or removal takes effect at the next request.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from msgspec import Struct

from policy import denials, errors
from policy.clocks import Deadline
from policy.decide import Decision
from sandbox.broker.server import Broker, BrokerCall, Handler
from sandbox.broker.vault_process import Fetcher
from sandbox.config import Config
from sandbox.kernel.proc.secret_memory import Locked, guard_process
from sandbox.rate_limit import Tokens
from sandbox.run_io import Outcome, Watches
from sandbox.vault.backend import Backend, OpenedSecret, is_name
from sandbox.vault.open import configured

# A program requests each secret once or twice; more requests are a search for secrets.
PER_SECOND, BURST, MOST_GRANTS = 10, 20, 1_000
LAYER: Final = "credential"
GRANT: Final = "permissions.credentials.grants"
NO_NAME: Final = ""
_TOKEN_BYTES = 32
_REFUSED = ("credential_refused", "this credential is not available")
_TOO_MANY = ("too_many_requests", f"at most {PER_SECOND} requests a second, and {MOST_GRANTS} answers a run")

# The secret for the duration of the call, None without one, or the error.
Found = OpenedSecret | errors.VaultError | None


class Source(Protocol):
    """A source of secrets and its name. It calls ``then`` once, at once or with the later answer."""

    @property
    def name(self) -> str:
        """The backend's."""

    def ask(self, agent_id: str, name: str, then: Callable[[Found], None]) -> None:
        """Look a secret up. ``name`` may be ``NO_NAME``, which no secret has."""

    def settle(self, watches: Watches) -> Outcome:
        """Wait until the request is answered or timed out, or one of ``watches`` returns an outcome."""


class Scope(Struct, frozen=True):
    """The credential grants of one run: effective names of this agent id, until so many seconds after its start."""

    agent_id: str
    names: Collection[str]
    seconds: float

    @classmethod
    def of(
        cls, decision: Decision, deadline: Deadline, *, owner: str = "", without: Collection[str] = frozenset()
    ) -> Scope:
        """Return the scope of a run, by the proved artefact. ``owner`` has the secrets, else the agent itself.

        ``without`` are granted names that the run itself is not given: those of its tool servers.
        """
        names = frozenset(decision.artefacts.json("credentials.json")["names"]) - frozenset(without)
        return cls(owner or decision.manifest.agent.id, names, deadline.milliseconds / 1000)


class Tellers(Struct, frozen=True):
    """The observer of grants.

    ``granted`` writes a durable row (name, version, backend) before the secret leaves; ``revoked`` says whether the run
    is being ended for it.
    """

    granted: Callable[[str, int, str], None]
    denied: denials.Told
    revoked: Callable[[], bool]


@dataclass
class Credentials:
    """One run's secrets, served over its broker. A row that cannot be written ends the run."""

    scope: Scope
    source: Source
    tell: Tellers
    clock: Callable[[], float] = time.monotonic
    _hash: bytes = field(default=b"", init=False)
    _until: float | None = field(default=None, init=False)
    _grants: int = field(default=0, init=False)
    _early: list[tuple[Handler, BrokerCall]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._rate = Tokens(PER_SECOND, BURST, self.clock())
        guard_process()

    @property
    def table(self) -> dict[str, Handler]:
        """For the broker."""
        return {"token": self.token, "credential": self.credential}

    def begin(self) -> None:
        """The agent is about to be given its intent: from here its deadline runs, and the token's time with it."""
        self._until = self.clock() + self.scope.seconds
        early, self._early = self._early, []
        for handler, call in early:
            handler(call)

    def token(self, call: BrokerCall) -> None:
        """Return the token of the run, to the first request."""
        if self._is_early(self.token, call):
            return
        if not self._rate.take(self.clock()):
            call.refuse(*_TOO_MANY)
        elif call.fields or self._hash or self._cause_of_all():
            self._refuse(call, NO_NAME, "token")
        else:
            token = secrets.token_urlsafe(_TOKEN_BYTES)
            self._hash = _hashed(token)
            call.answer({"token": token, "expires_ms": max(0, int((self._end() - self.clock()) * 1000))})

    def credential(self, call: BrokerCall) -> None:
        """Return one secret, to a request with the token."""
        if self._is_early(self.credential, call):
            return
        if self._grants >= MOST_GRANTS or not self._rate.take(self.clock()):
            self._tell(NO_NAME, "rate")
            call.refuse(*_TOO_MANY)
            return
        name, cause = self._judged(call.fields)
        # INVARIANT: a refused request does a look-up as well, under a name that no secret has.
        self.source.ask(
            self.scope.agent_id, NO_NAME if cause else name, lambda found: self._found(call, name, cause, found)
        )

    def put_all(self, put: Callable[[str, memoryview], None], watches: Watches, *, seconds: float) -> Outcome:
        """Give each granted secret that is there to ``put``, before the agent is started; of a run that is being ended
        no more than it has. ``watches`` are served while a vault takes its time; what one of them comes to ends it.

        Raises:
            errors.VaultError: the vault does not answer, or has taken longer than ``seconds`` for all.
        """
        until = self.clock() + seconds
        for name in sorted(self.scope.names):
            if self.tell.revoked():
                return None  # it is not started (sandbox.runner.gvisor)
            if self.clock() >= until:
                raise errors.VaultError(f"the vault has not given every secret within {seconds:g} s")
            said: list[errors.VaultError | None] = []
            self.source.ask(self.scope.agent_id, name, functools.partial(self._put, name, put, said))
            if (outcome := self.source.settle(watches)) is not None:
                return outcome
            error = said[0] if said else errors.VaultError("the vault does not answer")
            if error is not None:
                raise error
        return None

    def _put(
        self, name: str, put: Callable[[str, memoryview], None], said: list[errors.VaultError | None], found: Found
    ) -> None:
        said.append(found if isinstance(found, errors.VaultError) else None)
        if isinstance(found, OpenedSecret):
            self.tell.granted(name, found.version, self.source.name)
            put(name, found.value.view)
        elif found is None:
            self._tell(name, "absent")

    def _judged(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        """Return the name for the log, and the reason to refuse it before a look-up; empty if there is none."""
        name, token = fields.get("name"), fields.get("token")
        is_granted = isinstance(name, str) and name in self.scope.names
        is_ours = isinstance(token, str) and hmac.compare_digest(_hashed(token), self._hash)
        if not isinstance(name, str) or not is_name(name):
            return NO_NAME, "malformed"
        if set(fields) != {"name", "token"} or not self._hash or not is_ours:
            return name, "token"
        return name, self._cause_of_all() or ("" if is_granted else denials.NOT_GRANTED)

    def _cause_of_all(self) -> str:
        """Return the reason why no secret is given any more, if any."""
        if self.clock() >= self._end():
            return "expired"
        return "revoked" if self.tell.revoked() else ""

    def _found(self, call: BrokerCall, name: str, cause: str, found: Found) -> None:
        # Once more: the answer may have taken its time.
        cause = cause or self._cause_of_all()
        if cause or not isinstance(found, OpenedSecret):
            self._refuse(call, name, cause or ("absent" if found is None else "unavailable"))
            return
        self.tell.granted(name, found.version, self.source.name)
        self._grants += 1
        with json_text(found.value.view) as text:
            call.answer({"version": found.version}, secret=text)

    def _refuse(self, call: BrokerCall, name: str, cause: str) -> None:
        self._tell(name, cause)
        call.refuse(*_REFUSED)

    def _tell(self, name: str, cause: str) -> None:
        self.tell.denied(denials.Denial(LAYER, name, cause))

    def _end(self) -> float:
        return 0.0 if self._until is None else self._until

    def _is_early(self, handler: Handler, call: BrokerCall) -> bool:
        """Hold requests until the intent is given: a standby instance may wait long, and would get outdated secrets."""
        if self._until is not None:
            return False
        if len(self._early) < BURST:
            self._early.append((handler, call))
        else:
            call.refuse(*_TOO_MANY)
        return True


class Near(Struct, frozen=True):
    """A vault that answers at once."""

    vault: Backend

    @property
    def name(self) -> str:
        return self.vault.name

    def ask(self, agent_id: str, name: str, then: Callable[[Found], None]) -> None:
        try:
            with self.vault.opened(agent_id, name) as found:
                then(found)
        except errors.VaultError as e:
            then(e)

    def settle(self, watches: Watches) -> Outcome:
        """It has answered."""
        return None


class _Far:
    """A vault that takes its time, in a process of its own."""

    def __init__(self, name: str, fetcher: Fetcher, broker: Broker) -> None:
        self.name, self._fetcher, self._broker, self._is_watched = name, fetcher, broker, False

    def ask(self, agent_id: str, name: str, then: Callable[[Found], None]) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._broker.watch(self._fetcher.fileno(), self._fetcher.serve)
        self._fetcher.ask(agent_id, name, then)

    def settle(self, watches: Watches) -> Outcome:
        return self._fetcher.settle(watches)


def serve(
    broker: Broker, scope: Scope, tell: Tellers, *, config: Config, is_dev: bool, stack: contextlib.ExitStack
) -> Credentials | None:
    """Let ``broker`` serve the secrets of ``scope`` from the configured vault. ``stack`` outlives the run.

    Returns None if ``scope`` has no secret.

    Raises:
        errors.VaultError: Raised before the start when the vault cannot be opened, or when no operator signed for the
            agent id that owns these secrets.
    """
    if not scope.names:
        return None
    if is_dev:
        raise errors.VaultError(
            "what `covenant dev` signed is given no secret",
            hint="have an operator sign the package, and run it",
            grant=GRANT,
        )
    try:
        served = Credentials(scope, _source(broker, scope, config, stack), tell)
    except errors.VaultError as e:
        e.details["grant"] = GRANT
        raise
    broker.add(served.table, begin=served.begin)
    return served


def vault_of(config: Config, agent_id: str, stack: contextlib.ExitStack) -> Near | Fetcher:
    """Return the configured vault of an agent, once it has answered a question. ``stack`` outlives its use.

    Raises:
        errors.VaultError: the vault cannot be opened, or does not answer.
    """
    if config.vault.backend == "file":
        vault = configured(config)
        with vault.opened(agent_id, NO_NAME):
            return Near(vault)
    seconds = 2.0 * config.vault.timeout_seconds
    return stack.enter_context(Fetcher(lambda: configured(config), agent_id, seconds=seconds))


def _source(broker: Broker, scope: Scope, config: Config, stack: contextlib.ExitStack) -> Source:
    found = vault_of(config, scope.agent_id, stack)
    return found if isinstance(found, Near) else _Far(config.vault.backend, found, broker)


def json_text(value: memoryview) -> Locked:
    """Encode UTF-8 text for the inside of a JSON string, without a copy outside locked memory."""
    text = Locked(sum(len(_ESCAPES.get(byte, b"-")) for byte in value))
    at, out = 0, text.view
    for byte in value:
        escaped = _ESCAPES.get(byte)
        if escaped is None:
            out[at] = byte
            at += 1
        else:
            out[at : at + len(escaped)] = escaped
            at += len(escaped)
    return text


_ESCAPES: Final[Mapping[int, bytes]] = {
    **{byte: b"\\u%04x" % byte for byte in (*range(0x20), 0x7F)},
    ord('"'): b'\\"',
    ord("\\"): b"\\\\",
}


def _hashed(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
