"""The requests about runs: who lives, what is asked of one, what it wrote, what became of it (sandbox.control.manager).

Root sees and ends the runs of all; anybody else those that they asked for, and what these started.
"""

from __future__ import annotations

from policy import errors
from sandbox.control import manager
from sandbox.control.manager import Requester
from sandbox.serve.api import protocol
from sandbox.serve.api.session import Conversation


def ps(talk: Conversation, asked: protocol.Ps) -> None:
    """The live runs that the caller may see."""
    talk.answer({"kind": "runs", "runs": manager.listed(talk.supervisor.path, _requester(talk))})


def top(talk: Conversation, asked: protocol.Top) -> None:
    """The live runs that the caller may see, and what each uses."""
    talk.answer({"kind": "top", "runs": manager.used(talk.supervisor.path, _requester(talk))})


def operate(talk: Conversation, asked: protocol.Operate) -> None:
    """Suspend, resume or end a run; the answer comes when it is done.

    Raises:
        errors.CovenantError: it was refused, or could not be done.
    """
    done = manager.operate(
        talk.supervisor.path,
        _requester(talk),
        asked.operation,
        asked.run,
        reason=asked.reason,
        tree=asked.tree,
        grace_ms=asked.grace_ms,
    )
    talk.answer({"kind": "operated", "runs": done})


def logs(talk: Conversation, asked: protocol.Logs) -> None:
    """Answer with the stderr of a run from an offset on.

    Raises:
        errors.NoRunError: there is no such run that the caller may see.
    """
    answer = manager.logs(talk.supervisor.path, _requester(talk), asked.run, asked.offset)
    talk.answer({"kind": "logs", **answer})


def wait(talk: Conversation, asked: protocol.Wait) -> None:
    """The record of a run, when it has ended.

    Raises:
        errors.CovenantError: there is none.
    """
    record = manager.ended(talk.supervisor.path, _requester(talk), asked.run, left=talk.left)
    if record is None:
        raise errors.NoRunError("whoever waited has gone")
    talk.answer({"kind": "waited", "record": record.model_dump()})


def _requester(talk: Conversation) -> Requester:
    return Requester(talk.caller.display, root=talk.caller.uid == 0)
