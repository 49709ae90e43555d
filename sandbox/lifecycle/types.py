"""What is asked of the supervisor, what it lends to a run, and what came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policy import contract, decide, denials, errors
from policy.package import Package
from sandbox.audit.log import Ledger
from sandbox.broker import children as broker_children
from sandbox.config import Config
from sandbox.network import gateway
from sandbox.storage.trust_state import State

# Told of a run's id, and of (records, bytes of events, bytes of the chain) of the log before its first row.
Began = Callable[[str, tuple[int, int, int] | None], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: a package's bytes, the intent's text, who asks, and how long they will wait.

    ``user`` is for trusted-local; ``dev`` names the agent id whose local key of ``covenant dev`` decides instead of
    the trust root, and is empty for a run. ``package_name`` is where the package lies, as the operator knows it;
    ``intent_id`` and ``priority`` are what the agent is told, an id of ours where that is empty;
    ``children`` an open directory in which those of its children are looked for after the configured ones, with the
    ``rights`` of whoever asked. Whoever asks may say for whom (``behalf``: display and pubkey), which the log names and
    which decides nothing; ``told`` is then the issuer as the agent reads it. ``began`` is told of each run that comes
    of it, and of the head of the log when its first row was not written yet, None for that of the request.
    """

    package: Package
    text: str
    issuer: Mapping[str, str]
    timeout_ms: int | None = None
    user: str | None = None
    dev: str = ""
    package_name: str = ""
    intent_id: str = ""
    priority: str = "normal"
    children: int | None = None
    rights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    behalf: Mapping[str, str] | None = None
    told: Mapping[str, str] | None = None
    began: Began = lambda run_id, since: None

    @property
    def reads(self) -> Mapping[str, str]:
        """The issuer as the agent reads it."""
        return self.told or self.issuer


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a run that was started: ``error`` is None exactly when ``result`` is not. Times in seconds.
    ``interrupted``: this process was told to end when the answer was there already."""

    run_id: str
    intent_id: str
    agent_id: str
    policy_digest: str | None
    result: contract.AgentResult | None
    error: errors.CovenantError | None
    stderr: str
    not_enforced: tuple[str, ...] = ()
    unknown_sections: tuple[str, ...] = ()
    denials: tuple[denials.Row, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    usage: contract.Usage = contract.NOTHING_USED
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Means:
    """What the supervisor lends to a run. ``state`` is the one that decides: the supervisor's own, or a dev state.
    ``watches`` are whoever else may end it: a client that goes away (run_io.Channel.watches). ``below`` are those that
    end what it starts as well, whose descriptors its children's keepers keep. ``isolated`` says that this process's
    network namespace is not the host's. ``after`` is closed once the answer was given (spec.Job)."""

    path: Path
    config: Config
    ledger: Ledger
    state: State
    never_granted: tuple[str, ...]
    policies: decide.Policies
    watches: gateway.Watches = field(default_factory=dict)
    start_child: Callable[[Request, broker_children.Errand, broker_children.Say], None] | None = None
    keeps_standby: bool = False
    isolated: bool = False
    below: gateway.Watches = field(default_factory=dict)
    after: contextlib.ExitStack | None = None
