"""List, grant and deny the requests for which live runs are held (sandbox.lifecycle.lease_desks)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from policy import errors
from sandbox.control.manager import Requester, visible_runs
from sandbox.rundir.registry import Entry
from sandbox.shim import control_socket


def listed(state: Path, requester: Requester) -> dict[str, Any]:
    """Return the open requests and the leases of the live runs that the requester may see.

    A run that does not answer is left out: it has just ended, or it is starting and asks for nothing.
    """
    requests: list[dict[str, Any]] = []
    leases: list[dict[str, Any]] = []
    for _, answer in _runs(state, requester):
        requests += ({**answer["run"], **one} for one in answer["requests"])
        leases += ({**answer["run"], **one} for one in answer["leases"])
    return {"requests": requests, "leases": leases, "now_ms": int(time.time() * 1000)}


def grant(state: Path, requester: Requester, request: str, lease: str) -> dict[str, Any]:
    """Give a signed lease to the run of an open request. The run verifies it.

    Raises:
        errors.CovenantError: no such request waits, or the lease is refused.
    """
    entry, _ = _find(state, requester, request)
    return control_socket.ask(entry.path, "grant", lease=lease)


def deny(state: Path, requester: Requester, request: str) -> dict[str, Any]:
    """Deny an open request.

    Raises:
        errors.NoApprovalError: no such request waits.
    """
    entry, request_id = _find(state, requester, request)
    return control_socket.ask(entry.path, "deny", request=request_id, by=requester.display)


VERBS: Final[Mapping[str, Callable[..., dict[str, Any]]]] = {"list": listed, "grant": grant, "deny": deny}


def _runs(state: Path, requester: Requester) -> Iterator[tuple[Entry, dict[str, Any]]]:
    for entry in visible_runs(state, requester):
        with contextlib.suppress(errors.CovenantError):
            yield entry, control_socket.ask(entry.path, "approvals")


def _find(state: Path, requester: Requester, request: str) -> tuple[Entry, str]:
    found = [
        (entry, one["id"])
        for entry, answer in _runs(state, requester)
        for one in answer["requests"]
        if one["id"].startswith(request)
    ]
    if len(found) != 1 or not request:
        how = f"{len(found)} requests begin with" if found and request else "no request begins with"
        raise errors.NoApprovalError(f"{how} `{request[:64]}`", hint="covenant approvals list shows what waits")
    return found[0]
