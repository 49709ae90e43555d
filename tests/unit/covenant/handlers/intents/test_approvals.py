"""Check that only the operator sees and answers requests that wait for approval."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.handlers.intents import approvals
from covenant.runtime.runner import Runners
from covenant.wire import requests
from covenant.wire.parts import Approval
from covenant.wire.types import AgentId
from policy import errors
from tests import intents_kit, runtime_kit, server_kit
from tests.intents_kit import ALICE

pytestmark = pytest.mark.anyio

WAITING = Approval(
    id="w", intent_id="i", run_id="r", agent_id="a", description="d", command="c", choices=("once",), requested_at=1
)


class Waits:
    """``runner.Approving`` with one waiting request."""

    def __init__(self) -> None:
        self.answered: list[tuple[str, str, AgentId]] = []

    def approvals(self) -> tuple[Approval, ...]:
        return (WAITING,)

    async def resolve(self, approval_id: str, choice: str, *, by: AgentId) -> int:
        self.answered.append((approval_id, choice, by))
        return 1


async def test_operator_alone_sees_and_answers(tmp_path: Path) -> None:
    waits = Waits()
    server = intents_kit.make(tmp_path, runners=Runners({}, waits))
    operator = server_kit.caller(server.identity.agent, operator=True)
    asked = requests.ResolveApproval(approval_id="w", choice="once")
    for handler, request in ((approvals.list_approvals, requests.ListApprovals()), (approvals.resolve_approval, asked)):
        with pytest.raises(errors.OperatorOnlyError):
            await handler(server, ALICE, request)  # type: ignore[arg-type]
    assert waits.answered == []
    assert (await approvals.list_approvals(server, operator, requests.ListApprovals())).approvals == (WAITING,)
    answer = await approvals.resolve_approval(server, operator, asked)
    assert (answer.approval_id, answer.choice, answer.resolved) == ("w", "once", 1)
    assert waits.answered == [("w", "once", operator.agent)]


async def test_without_hermes_nothing_waits(tmp_path: Path) -> None:
    server = intents_kit.make(tmp_path)
    operator = server_kit.caller(server.identity.agent, operator=True)
    assert (await approvals.list_approvals(server, operator, requests.ListApprovals())).approvals == ()
    with pytest.raises(errors.NoApprovalError):
        await approvals.resolve_approval(server, operator, requests.ResolveApproval(approval_id="w", choice="once"))
    assert ALICE.agent == runtime_kit.ALICE
