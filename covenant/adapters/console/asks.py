"""The requests that the console's pages may send to the daemon and the supervisor: a closed table, few of them acts.

A page may not ask for a token, a secret or a signature, nor for a further link: a script that got into a page could
read and steer what its operator can see, and no more, and nothing of it after the session.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import anyio
import anyio.to_thread

from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.wire import requests, responses
from policy import errors, wire_json
from policy.signing import strict_json

# Asks the supervisor once.
AskSupervisor = Callable[..., Awaitable[Mapping[str, Any]]]
# Answers a request about packages; blocks.
ViewPackages = Callable[[str, Mapping[str, str]], Mapping[str, Any]]

DAEMON: Final = frozenset(
    {
        "a2_a_queue",
        "cancel_a2_a_task",
        "capability_usage",
        "get_intent_result",
        "list_agents",
        "list_approvals",
        "list_expiries",
        "list_peers",
        "list_tools",
        "prove_audit_inclusion",
        "recent_a2_a_results",
        "recent_a2_a_tasks",
        "recent_audit",
        "recent_capabilities",
        "recent_debits",
        "recent_denials",
        "recent_memory",
        "recent_receipts",
        "resolve_approval",
        "resume_intent",
        "revoke_capability",
        "revoke_peer",
        "search_memory",
        "verify_audit_integrity",
    }
)
# About packages, with their fields, all texts: what an agent may do, why it was denied, what another manifest allows.
PACKAGES: Final[Mapping[str, frozenset[str]]] = {
    "agent_rules": frozenset({"agent_id"}),
    "compare_manifest": frozenset({"agent_id", "manifest"}),
    "explain_denial": frozenset({"agent_id", "layer", "target", "code"}),
}
# With their fields: what else a page sends is refused here, and reaches no parameter of the client.
SUPERVISOR: Final[Mapping[str, frozenset[str]]] = {
    "approvals": frozenset({"verb", "request"}),
    "logs": frozenset({"run", "offset", "stream"}),
    "operate": frozenset({"operation", "run", "tree", "reason"}),
    "ps": frozenset(),
    "top": frozenset(),
    "workspace": frozenset({"verb", "run", "paths", "digest"}),
}
# Of workspaces, with the fields of each. An apply names the digest of the changes that its page showed; an approval is
# signed elsewhere.
WORKSPACE: Final[Mapping[str, frozenset[str]]] = {
    "list": frozenset(),
    "diff": frozenset({"run"}),
    "texts": frozenset({"run", "paths"}),
    "apply": frozenset({"run", "digest"}),
    "discard": frozenset({"run"}),
}
# Of what runs are held for. A grant is a lease, which an operator's key signs elsewhere.
APPROVALS: Final[Mapping[str, frozenset[str]]] = {"list": frozenset(), "deny": frozenset({"request"})}
_VERBS: Final = {"workspace": WORKSPACE, "approvals": APPROVALS}
# The requests that a supervisor gets from all pages at once; it takes 32 of one user.
_AT_ONCE: Final = 4
# A granted path of a file system that hangs must not keep the pages waiting.
_VIEW_SECONDS: Final = 30.0


class Asks:
    """The requests of all pages of one daemon."""

    def __init__(self, server: Server, supervisor: AskSupervisor, packages: ViewPackages) -> None:
        self._server, self._supervisor, self._packages = server, supervisor, packages
        self._turns = anyio.Semaphore(_AT_ONCE)
        # A compilation takes a core for a third of a second.
        self._compiler = anyio.Semaphore(1)

    async def answer(self, caller: Caller, body: bytes) -> bytes:
        """Return the document that answers the request in ``body``: ``of``, ``kind`` and the fields of the kind.

        Raises:
            errors.MalformedRequestError: it is no such document, or of a kind that pages may not send.
        """
        asked = wire_json.read(body)
        if not isinstance(asked, dict):
            raise errors.MalformedRequestError("a request is a JSON object")
        of, kind = asked.pop("of", None), asked.get("kind")
        if not isinstance(kind, str):
            raise errors.MalformedRequestError("a request has a kind")
        if of == "daemon" and kind in DAEMON:
            request = requests.parse(json.dumps(asked).encode())
            return (await self._server.respond(caller, request)).to_bytes()
        if of == "supervisor" and kind in SUPERVISOR:
            return await self._of_supervisor(asked)
        if of == "packages" and kind in PACKAGES:
            return await self._of_packages(asked)
        raise errors.MalformedRequestError(f"the console sends no `{strict_json.shown(kind[:64])}`")

    async def runs(self) -> bytes:
        """Return the answer to ``top``, or the error document."""
        return await self._of_supervisor({"kind": "top"})

    async def held(self) -> bytes:
        """Return the answer to ``approvals list``, or the error document."""
        return await self._of_supervisor({"kind": "approvals", "verb": "list"})

    async def _of_supervisor(self, asked: dict[str, Any]) -> bytes:
        kind = asked.pop("kind")
        if not asked.keys() <= SUPERVISOR[kind]:
            raise errors.MalformedRequestError(f"`{kind}` has the fields {', '.join(sorted(SUPERVISOR[kind]))}")
        if kind in _VERBS and _VERBS[kind].get(str(asked.get("verb"))) != frozenset(asked) - {"verb"}:
            raise errors.MalformedRequestError(f"the console sends no such request of the kind {kind}")
        try:
            async with self._turns:
                document = await self._supervisor(kind, **asked)
        except errors.CovenantError as e:
            return responses.Error.of(e).to_bytes()
        return _encoded(document)

    async def _of_packages(self, asked: dict[str, Any]) -> bytes:
        kind = asked.pop("kind")
        if asked.keys() != PACKAGES[kind] or not all(isinstance(value, str) for value in asked.values()):
            raise errors.MalformedRequestError(f"`{kind}` has the texts {', '.join(sorted(PACKAGES[kind]))}")
        try:
            async with self._compiler:
                document = await self._viewed(kind, asked)
        except errors.CovenantError as e:
            return responses.Error.of(e).to_bytes()
        return _encoded(document)

    async def _viewed(self, kind: str, fields: Mapping[str, str]) -> Mapping[str, Any]:
        with anyio.move_on_after(_VIEW_SECONDS):
            return await anyio.to_thread.run_sync(self._packages, kind, fields, abandon_on_cancel=True)
        raise errors.ServiceError(
            "the package was not compiled in time", hint="covenant policy explain PACKAGE shows where it waits"
        )


def _encoded(document: Mapping[str, Any]) -> bytes:
    """Return the JSON of a document. Half a surrogate pair in a text of an agent becomes `?`: UTF-8 has none."""
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
