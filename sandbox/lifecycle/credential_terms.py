"""The supervisor's part of a run's secrets: the vault behind its broker, and those that its tool servers are given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from msgspec import Struct

from policy.clocks import Deadline
from policy.decide import Decision
from sandbox.audit.denials import DenialLog
from sandbox.audit.run_events import RunEvents
from sandbox.broker import credentials
from sandbox.broker.server import Broker
from sandbox.config import Config
from sandbox.lifecycle.types import Request
from sandbox.runner.spec import Secrets


class CredentialTerms(Struct, frozen=True):
    """The operator's part: configuration, the rows and denials of the run, and whether it is being ended."""

    config: Config
    rows: RunEvents
    denials: DenialLog
    revoked: Callable[[], bool]


def of(
    broker: Broker,
    decision: Decision,
    deadline: Deadline,
    request: Request,
    terms: CredentialTerms,
    stack: contextlib.ExitStack,
) -> Secrets | None:
    """Let ``broker`` serve the secrets of a run, and return what makes them files. None without a secret.

    A secret that a tool server is given is that server's alone: the agent is not given it.

    Raises:
        errors.VaultError: as ``credentials.serve``.
    """
    theirs: frozenset[str] = frozenset()
    if decision.effective.skills.mcp:
        from sandbox.lifecycle import tool_terms

        theirs = tool_terms.secrets_of(request.package)
    scope = credentials.Scope.of(decision, deadline, owner=request.secrets_of, without=theirs)
    tell = credentials.Tellers(terms.rows.credential_granted, terms.denials.told, terms.revoked)
    served = credentials.serve(broker, scope, tell, config=terms.config, is_dev=request.is_dev, stack=stack)
    return None if served is None else functools.partial(served.put_all, seconds=terms.config.start_deadline_seconds)
