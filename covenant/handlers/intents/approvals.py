"""The requests about approvals: what runs at a Hermes API wait for, and the operator's answer.

Only for agents whose ``approval_policy`` is ``operator-prompt``; the other policies answer by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from covenant.handlers import paging
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.runtime.runner import Approving
from covenant.wire import requests, responses
from policy import errors
from policy.signing import strict_json


async def list_approvals(server: Server, caller: Caller, asked: requests.ListApprovals) -> responses.Approvals:
    """List the waiting approvals; for the operator alone, since they show the intents of other callers.

    Raises:
        errors.OperatorOnlyError: the caller is not the operator.
    """
    await authorization.require_operator(server, caller, None, "see what waits for approval")
    approving: Approving | None = server.runners.approving
    return responses.Approvals(approvals=() if approving is None else paging.that_fit(approving.approvals()))


async def resolve_approval(
    server: Server, caller: Caller, asked: requests.ResolveApproval
) -> responses.ApprovalResolved:
    """Answer an approval. The operator issues its rows.

    Raises:
        errors.OperatorOnlyError: the caller is not the operator.
        errors.NoApprovalError: none waits under this id, or it does not offer this choice.
        errors.CovenantError: the answer could not be written down, or not be given.
    """
    await authorization.require_operator(server, caller, None, "answer for a run")
    approving: Approving | None = server.runners.approving
    if approving is None:
        raise errors.NoApprovalError(f"no approval `{strict_json.shown(asked.approval_id)}` waits")
    resolved = await approving.resolve(asked.approval_id, asked.choice, by=caller.agent)
    return responses.ApprovalResolved(approval_id=asked.approval_id, choice=asked.choice, resolved=resolved)


HANDLERS: Final[Mapping[str, Handler]] = {"list_approvals": list_approvals, "resolve_approval": resolve_approval}
