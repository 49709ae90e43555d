"""The requests about runs: who lives, what is asked of one, what it wrote, what became of it (sandbox.control.manager).

Root sees and ends the runs of all; anybody else those that they asked for, and what these started.
"""

from __future__ import annotations

import os

from policy import errors
from sandbox.control import approvals as control
from sandbox.control import manager
from sandbox.control.manager import Requester
from sandbox.serve.api import protocol
from sandbox.serve.api.session import Session


def ps(session: Session, asked: protocol.Ps) -> None:
    """The live runs that the caller may see."""
    session.answer({"kind": "runs", "runs": manager.listed(session.supervisor.path, _requester(session))})


def top(session: Session, asked: protocol.Top) -> None:
    """The live runs that the caller may see, and what each uses."""
    session.answer({"kind": "top", "runs": manager.used(session.supervisor.path, _requester(session))})


def operate(session: Session, asked: protocol.Operate) -> None:
    """Suspend, resume or end a run; the answer comes when it is done.

    Raises:
        errors.CovenantError: it was refused, or could not be done.
    """
    done = manager.operate(
        session.supervisor.path,
        _requester(session),
        asked.operation,
        asked.run,
        reason=asked.reason,
        tree=asked.tree,
        grace_ms=asked.grace_ms,
    )
    session.answer({"kind": "operated", "runs": done})


def logs(session: Session, asked: protocol.Logs) -> None:
    """Answer with the stderr of a run from an offset on.

    Raises:
        errors.NoRunError: there is no such run that the caller may see.
    """
    state, requester = session.supervisor.path, _requester(session)
    run = asked.run or manager.newest(state, requester, asked.agent or "")
    answer = manager.logs(state, requester, run, asked.offset, stream=asked.stream)
    session.answer({"kind": "logs", **answer})


def approvals(session: Session, asked: protocol.ApprovalsRequest) -> None:
    """Answer a request about what runs are held for.

    Raises:
        errors.CovenantError: it was refused.
    """
    answer = control.VERBS[asked.verb](session.supervisor.path, _requester(session), **asked.fields)
    session.answer({"kind": "approvals", **answer})


def attach(session: Session, asked: protocol.AttachRequest) -> None:
    """Connect the caller's pipes to a run's terminal, and answer with the run's record when it has ended.

    Raises:
        errors.CovenantError: it was refused, or there is no record.
    """
    pipes = session.pipe(0, os.O_RDONLY), session.pipe(1, os.O_WRONLY), session.pipe(2, os.O_RDONLY)
    size = (asked.terminal.rows, asked.terminal.columns)
    run_id = manager.attach(session.supervisor.path, _requester(session), asked.run, pipes, size)
    # The client's ends of file come from the run's shim alone, which has the pipes by now.
    while session.fds:
        os.close(session.fds.pop())
    session.state("attached", run_id=run_id)
    _ended(session, run_id)


def wait(session: Session, asked: protocol.Wait) -> None:
    """The record of a run, when it has ended.

    Raises:
        errors.CovenantError: there is none.
    """
    _ended(session, asked.run)


def _ended(session: Session, run: str) -> None:
    record = manager.ended(session.supervisor.path, _requester(session), run, left=session.left)
    if record is None:
        raise errors.NoRunError("whoever waited has gone")
    session.answer({"kind": "waited", "record": record.model_dump()})


def _requester(session: Session) -> Requester:
    return Requester(session.caller.display, root=session.caller.uid == 0)
