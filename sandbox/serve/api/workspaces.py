"""The request about workspaces, for the caller of a connection: its own, root's all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

from sandbox.kernel.fs import hanging
from sandbox.serve.api import protocol, rlimits
from sandbox.serve.api.session import Session
from sandbox.workspace import requests, store
from sandbox.workspace.caller import CallerIdentity

# How long a request of a user may take, and each access to a directory, which may be on a file system of that user's.
_SECONDS: Final = 600.0
_ACCESS_SECONDS: Final = 240
# A million changes take less.
_MEMORY: Final = 2 << 30


def answer(session: Session, asked: protocol.WorkspaceRequest) -> None:
    """Answer it with the caller's rights.

    Raises:
        errors.CovenantError: it is refused, or failed.
    """
    who, config = session.caller, session.supervisor.config
    identity = None if who.uid == 0 else CallerIdentity(who.uid, who.gid, who.groups)
    with contextlib.ExitStack() as stack:
        if identity is not None:
            # One at a time of each user: many at once would take the memory of the machine.
            turn = rlimits.turn(session.supervisor.path, who.uid, float(config.request_seconds), of="workspaces")
            stack.enter_context(turn)
            stack.enter_context(rlimits.memory(_MEMORY))
            stack.enter_context(hanging.within("the file system of a workspace", _SECONDS))
        own = stack.enter_context(session.opened())

        def log(kind: str, fields: Mapping[str, Any]) -> None:
            own.ledger.append(kind, fields, issuer=session.issuer(own), now_ms=int(time.time() * 1000))

        workspaces = requests.WorkspaceRequests(
            own.path,
            requests.WorkspaceRequester(who.display, identity, 0 if identity is None else _ACCESS_SECONDS),
            log,
            store.UserLimits(config.kept_workspaces, config.kept_workspaces_mb),
        )
        session.answer(workspaces.answer(asked.verb, **asked.fields))
