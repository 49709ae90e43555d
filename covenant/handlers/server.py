"""The seed's ``Server::respond``: holds all stores and answers each request with one response."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from covenant.handlers.caller import Caller
from covenant.handlers.state.console_logins import ConsoleLogins
from covenant.handlers.state.event_feed import Feed
from covenant.handlers.state.intent_progress import RunningIntents
from covenant.handlers.state.pending_writes import PendingWrites
from covenant.handlers.state.rate_limit import FREE, Rates
from covenant.handlers.state.refusal_summary import RefusalSummary
from covenant.handlers.state.request_metrics import Meter
from covenant.keys.identity import Identity
from covenant.providers.chain.interface import Chain, OffChain
from covenant.providers.embed.pick import Embedder
from covenant.providers.tools import ToolRegistry
from covenant.runtime.agents import Agents
from covenant.runtime.runner import Runners
from covenant.settings import Settings
from covenant.stores.audit.interface import AuditLog
from covenant.stores.budget.interface import BudgetLedger, Checkpoints
from covenant.stores.capabilities.interface import Capabilities
from covenant.stores.clock import SteadyClock
from covenant.stores.mailbox.interface import Mailbox
from covenant.stores.memory.interface import Memory
from covenant.stores.peers.interface import Peers
from covenant.stores.settlement.interface import Receipts
from covenant.wire import requests, responses
from policy import errors

if TYPE_CHECKING:
    from covenant.handlers.state.ignore_rules import IgnoreSet
    from covenant.handlers.state.other_hosts import OtherHosts
    from covenant.handlers.state.secret_source import SecretSource

_LOG = logging.getLogger(__name__)

# A handler takes the class of its kind and refuses by raising a CovenantError; `Any`, since each takes a different one.
Handler = Callable[["Server", Caller, Any], Awaitable[responses.Response]]


@dataclass(slots=True, kw_only=True)
class Server:
    """The stores and services that handlers use. ``now_ms`` is the only clock: Unix milliseconds that
    never go back unless the operator takes ``clock`` back."""

    home: Path
    now_ms: Callable[[], int]
    settings: Settings
    identity: Identity
    audit: AuditLog
    capabilities: Capabilities
    peers: Peers
    memory: Memory
    embedder: Embedder
    ignore: IgnoreSet
    budget: BudgetLedger
    checkpoints: Checkpoints
    receipts: Receipts
    mailbox: Mailbox
    tools: ToolRegistry
    agents: Agents
    runners: Runners
    secrets: SecretSource
    handlers: Mapping[str, Handler]
    clock: SteadyClock
    feed: Feed = field(default_factory=Feed)
    meter: Meter = field(default_factory=Meter)
    chain: Chain = field(default_factory=OffChain)
    # None without known-hosts.toml (covenant.handlers.mailbox.cross_host).
    other_hosts: OtherHosts | None = None
    live: RunningIntents = field(init=False)
    console: ConsoleLogins = field(init=False)
    unfinished: PendingWrites = field(default_factory=PendingWrites)
    refusals: RefusalSummary = field(default_factory=RefusalSummary)
    rates: Rates = field(init=False)
    # Intents with a key whose ends are known to be complete (respond.intent).
    whole: dict[str, None] = field(default_factory=dict)
    # At most one peer at a time may verify all stores (respond.verify); the operator does not wait for peers.
    verifying: anyio.Lock = field(default_factory=anyio.Lock)

    def __post_init__(self) -> None:
        self.live = RunningIntents(self.feed)
        self.console = ConsoleLogins(self.now_ms)
        self.rates = Rates(self.settings.peer_rate)

    async def respond(self, caller: Caller, request: requests.Request) -> responses.Response:
        """Return the only response to a request. A refusal is a response too, and so is an internal error, which is
        logged."""
        with self.meter.request(request.kind) as answered:
            response = await self._answer(caller, request)
            answered.be(response)
            return response

    async def _answer(self, caller: Caller, request: requests.Request) -> responses.Response:
        try:
            if request.kind not in FREE:
                self.rates.admit(caller, self.refusals, self.now_ms())
            return await self.handlers[request.kind](self, caller, request)
        except errors.CovenantError as e:
            return responses.Error.of(e)
        except Exception:
            _LOG.exception("`%s` of %s failed", request.kind, caller.agent.display)
            return responses.Error.of(errors.InternalError("the daemon failed at this", hint="see its log"))
