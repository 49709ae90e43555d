"""Push notifications: POST a task to the URLs that its sender named, at each change of its state.

    mailbox ── change ──> the sender's lane ── one after another ──> URL below a rule of the operator's

The URLs are untrusted: each is checked when it is set and when it is called, names must resolve to public addresses
alone, the connection goes to an address that was checked, and no redirect, proxy or cookie is followed or kept. A
sender's slow URL delays that sender's notifications alone. Configurations end with their task, and with the daemon:
the secrets in them are never written to a disk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import socket
import uuid
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import anyio
import anyio.abc
import msgspec
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from covenant.handlers.caller import Caller
from covenant.handlers.mailbox import a2a
from covenant.handlers.server import Server
from covenant.wire.a2a import faults, push_urls, shapes
from covenant.wire.a2a.calls import Dialect, PushTarget
from covenant.wire.a2a.push_urls import PushUrl
from covenant.wire.a2a.shapes import TaskView
from policy import errors

_LOG: Final = logging.getLogger(__name__)

MOST_OF_TASK: Final = 4
MOST_OF_SENDER: Final = 256
MOST: Final = 4096
_ID_CHARACTERS: Final = 128
_REQUEST_SECONDS: Final = 10.0
# The waits between the attempts of one notification.
RETRY_SECONDS: Final = (1.0, 5.0)


@dataclasses.dataclass(slots=True)
class _Watched:
    """A task with push configurations. ``said`` is the last state that was sent."""

    caller: Caller
    agent_id: str
    task_id: str
    targets: dict[str, tuple[PushTarget, Dialect]] = dataclasses.field(default_factory=dict)
    said: str = ""


class Pushes:
    """The push configurations of one daemon, and their delivery.

    Args:
        group: runs the deliveries.
        allowed: the URLs that the operator listed; without any no configuration is taken.
    """

    def __init__(self, server: Server, group: anyio.abc.TaskGroup, allowed: Sequence[PushUrl]) -> None:
        self._server, self._group, self.allowed = server, group, tuple(allowed)
        self._watched: dict[str, _Watched] = {}
        # The due tasks of each sender that has a running lane, oldest first.
        self._lanes: dict[str, dict[str, None]] = {}
        self._session: aiohttp.ClientSession | None = None
        if self.allowed:
            a2a.follow_all(server, self._heard)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    # Configurations -------------------------------------------------------------------------------------------

    def require(self) -> None:
        """Refuse every configuration where the operator lists no URL.

        Raises:
            errors.HttpRefusedError: this daemon sends none.
        """
        if not self.allowed:
            raise faults.refused(faults.NO_PUSH, "this daemon sends no push notifications")

    def check(self, caller: Caller, target: PushTarget) -> None:
        """Refuse what ``set`` would refuse for a task that is not sent yet.

        Raises:
            errors.HttpRefusedError: the operator does not list its URL, or its id cannot be used.
            errors.BusyError: the caller, or the daemon, has too many.
        """
        push_urls.check(self.allowed, target.url)
        if len(target.id) > _ID_CHARACTERS or not target.id.isascii() or "/" in target.id:
            raise faults.refused(faults.INVALID_PARAMS, f"an id has {_ID_CHARACTERS} characters of ASCII at most")
        self._make_room(caller)

    def set(self, caller: Caller, agent_id: str, task_id: str, target: PushTarget, dialect: Dialect) -> PushTarget:
        """Keep a configuration for a task of the caller, and send the state that the task has now.

        Raises:
            errors.HttpRefusedError: its URL is not allowed.
            errors.NoTaskError: the caller has no such task.
            errors.BusyError: there are too many.
        """
        self.check(caller, target)
        entry = a2a.find(self._server, caller, agent_id, task_id)
        watched = self._watched.get(entry.task.id) or _Watched(caller, agent_id, task_id)
        for kept, _ in watched.targets.values():
            # A message that is sent again has the configuration that it had, under an id of ours.
            if not target.id and msgspec.structs.replace(kept, id="") == target:
                return kept
        name = target.id or str(uuid.uuid4())
        if name not in watched.targets and len(watched.targets) >= MOST_OF_TASK:
            raise errors.BusyError("the task has as many push configurations as it may", hint="delete some of them")
        kept = msgspec.structs.replace(target, id=name)
        watched.targets[name] = (kept, dialect)
        watched.said = ""
        self._watched[entry.task.id] = watched
        self._heard(entry.task.id)
        return kept

    def _make_room(self, caller: Caller) -> None:
        mine = sum(len(one.targets) for one in self._watched.values() if one.caller.agent == caller.agent)
        every = sum(len(one.targets) for one in self._watched.values())
        if mine >= MOST_OF_SENDER or every >= MOST:
            raise errors.BusyError("as many push configurations are set as may be", hint="delete some of them")

    def listed(self, caller: Caller, agent_id: str, task_id: str) -> list[PushTarget]:
        """Return the configurations of a task of the caller, oldest first.

        Raises:
            errors.NoTaskError: the caller has no such task.
        """
        watched = self._watched.get(a2a.find(self._server, caller, agent_id, task_id).task.id)
        return [] if watched is None else [target for target, _ in watched.targets.values()]

    def delete(self, caller: Caller, agent_id: str, task_id: str, name: str) -> None:
        """Delete a configuration; one that is not there too.

        Raises:
            As ``listed``.
        """
        self.listed(caller, agent_id, task_id)
        found = a2a.find(self._server, caller, agent_id, task_id).task.id
        if (watched := self._watched.get(found)) is not None:
            watched.targets.pop(name, None)
            if not watched.targets:
                del self._watched[found]

    # Delivery -------------------------------------------------------------------------------------------------

    def _heard(self, name: str) -> None:
        watched = self._watched.get(name)
        if watched is None:
            return
        owner = watched.caller.agent.pubkey
        if (lane := self._lanes.get(owner)) is not None:
            lane[name] = None
            return
        self._lanes[owner] = {name: None}
        self._group.start_soon(self._deliver_all, owner)

    async def _deliver_all(self, owner: str) -> None:
        lane = self._lanes[owner]
        try:
            while lane:
                name = next(iter(lane))
                del lane[name]
                try:
                    await self._deliver(name)
                except Exception:
                    _LOG.exception("a push notification of task %s failed", name)
        finally:
            # INVARIANT: no await between the end of the loop and this line, so that no due task is left in a lane.
            del self._lanes[owner]

    async def _deliver(self, name: str) -> None:
        """Send a task's state to each of its URLs, once for each state."""
        watched = self._watched.get(name)
        if watched is None:
            return
        try:
            view = a2a.view(a2a.find(self._server, watched.caller, watched.agent_id, watched.task_id))
        except errors.NoTaskError:
            del self._watched[name]
            return
        if not a2a.let_in(self._server, watched.caller):
            del self._watched[name]
            return
        if view.state == watched.said:
            return
        watched.said = view.state
        for target, dialect in list(watched.targets.values()):
            await self._send(watched, view, target, dialect)
        if view.ended and self._watched.get(name) is watched and watched.said == view.state:
            del self._watched[name]

    async def _send(self, watched: _Watched, view: TaskView, target: PushTarget, dialect: Dialect) -> None:
        body = json.dumps(shapes.sent(view, dialect), separators=(",", ":")).encode()
        outcome = "failed"
        for pause in (0.0, *RETRY_SECONDS):
            await anyio.sleep(pause)
            if not self._is_wanted(watched, target):
                outcome = "withdrawn"
                break
            outcome = await self._post(target, body)
            if outcome != "failed":
                break
        row = {
            "task_id": view.id,
            "state": view.state.lower(),
            "url_hash_hex": hashlib.sha256(target.url.encode()).hexdigest(),
            "outcome": outcome,
        }
        await self._server.audit.append("a2_a_push_sent", row, watched.caller.agent)

    def _is_wanted(self, watched: _Watched, target: PushTarget) -> bool:
        """Whether the configuration is there still, and its owner is let in: a slow URL takes longer than either."""
        kept = any(target is one for one, _ in watched.targets.values())
        return kept and a2a.let_in(self._server, watched.caller)

    async def _post(self, target: PushTarget, body: bytes) -> str:
        """Send one request. Returns `delivered`, `refused` for an address that may not be reached, or `failed`."""
        url = push_urls.check(self.allowed, target.url)
        headers = {"Content-Type": "application/json", "User-Agent": "covenantd"}
        if target.token:
            headers["X-A2A-Notification-Token"] = target.token
        if target.scheme and target.credentials:
            headers["Authorization"] = f"{target.scheme} {target.credentials}"
        try:
            async with self._opened().post(
                yarl.URL(str(url), encoded=True), data=body, headers=headers, allow_redirects=False
            ) as answer:
                # The answer's body is not read.
                return "delivered" if 200 <= answer.status < 300 else "failed"
        except _AddressError:
            return "refused"
        except aiohttp.ClientConnectorError as e:
            return "refused" if isinstance(e.__cause__, _AddressError) else "failed"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return "failed"

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    # One connection for each sender's lane: a common limit would let some senders delay all others.
                    resolver=_PublicOnly(),
                    use_dns_cache=False,
                    force_close=True,
                    limit=0,
                ),
                timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS),
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session


class _AddressError(OSError):
    """Raised when a name resolves to an address that is not public."""


class _PublicOnly(AbstractResolver):
    """Resolves names to public addresses. The connection is made to what it returns, so that no second look-up by
    another server can answer otherwise. Addresses in a URL are not resolved: the operator's rule has them."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a name.

        Raises:
            OSError: it has none, or one that is not public.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if not all(push_urls.is_public(str(each[4][0])) for each in found):
            raise _AddressError("the name has an address that is not public")
        return [_resolved(host, each) for each in found]

    async def close(self) -> None:
        """Close nothing."""


def _resolved(host: str, info: Any) -> ResolveResult:
    family, _, proto, _, address = info
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return {
        "hostname": host,
        "host": address[0],
        "port": address[1],
        "family": family,
        "proto": proto,
        "flags": flags,
    }
