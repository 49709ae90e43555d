"""The supervisor's part of a run's commands: what is granted, the rows of calls, and the line to the service gate."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from policy import decide
from sandbox.broker import children, server

if TYPE_CHECKING:
    from sandbox.lifecycle.context import RunContext


def serve(
    context: RunContext,
    decision: decide.Decision,
    stack: contextlib.ExitStack,
    manager: children.ChildManager,
    broker: server.Broker,
) -> None:
    """Serve the commands of a run, until ``stack`` is closed. Only runs that have some pay for the import."""
    from sandbox.broker import command_calls

    context.commands = desk = command_calls.CommandDesk(
        decision.effective.skills,
        decision.manifest.agent.id,
        manager,
        broker,
        log=context.rows.tool,
        sync=context.rows.sync,
        denied=context.denials.told,
    )
    stack.callback(desk.close)
