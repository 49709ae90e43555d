"""The tools of signed packages in the daemon's registry: one session for each entry ``[[mcp.server]]``, kept alive.

The pins of a package's tools.json say which tools there can be. A session may list fewer, also later
(``notifications/tools/list_changed``), and never others. A session that ends is started again, after a pause that
doubles. Its tools stay listed meanwhile, and calls of them fail; they are removed when the supervisor refuses the
package: its signature ended or was revoked, or its files do not verify.

A name is that of the first entry whose package pins it, however fast the others start and also while that package is
refused: a grant of `tool.call.NAME` never becomes one of another package's tool.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import anyio

from covenant.fair_share import Shares
from covenant.providers import tool_packages
from covenant.providers.mcp_servers import McpServer
from covenant.providers.tools import Answer, ToolRegistry
from covenant.runtime.supervisor_client import Supervised
from covenant.runtime.tool_session import CALLS, ToolSession
from covenant.visible import visible
from covenant.wire.types import ToolSpec
from policy import errors
from policy.manifest.tools.advertised import AdvertisedTool
from policy.manifest.tools.document import Tool

_LOG: Final = logging.getLogger(__name__)

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
# A refused package changes when an operator changes it. Each attempt is a row of the supervisor's log.
REFUSED_PAUSE: Final = 300.0
# A session that lasted so long did not fail at its start: the next pause is the first one again.
_STEADY_SECONDS: Final = 60.0
# Of the tools that are left out, so many are named in the one warning, each by so many characters.
_SHOWN_NAMES: Final = 5
_SHOWN_CHARACTERS: Final = 64
# To read one package. At the start all are read at one time, before the first session.
_READ_SECONDS: Final = 30.0
# The gate limits a call itself. Its time begins when the server was started, which takes up to LIST_SECONDS there.
_BEYOND_SECONDS: Final = 70.0

# Calls of one caller under way at one server. The other callers have the rest, however long these take.
CALLS_OF_ONE: Final = 16

State = Literal["starting", "ready", "reconnecting", "refused"]


class Audit(Protocol):
    """The log of changes."""

    async def append(self, kind: str, fields: Mapping[str, Any]) -> str:
        """Write a row."""


async def keep(
    servers: Sequence[McpServer], supervised: Supervised, registry: ToolRegistry, audit: Audit, *, operator: str = ""
) -> None:
    """Keep a session with each server until this is cancelled. ``operator`` is the operator's public key."""
    names: dict[str, str] = {}
    kept = [KeptServer(server, supervised, registry, audit, names, operator=operator) for server in servers]
    async with anyio.create_task_group() as group:
        for one in kept:
            group.start_soon(one.look)
    for one in kept:
        one.claim()
    async with anyio.create_task_group() as group:
        for one in kept:
            group.start_soon(one.run)


class KeptServer:
    """One entry, its session, and its tools in the registry. ``names`` are the entries of all names so far."""

    def __init__(
        self,
        server: McpServer,
        supervised: Supervised,
        registry: ToolRegistry,
        audit: Audit,
        names: dict[str, str],
        *,
        operator: str = "",
    ) -> None:
        self.server, self._supervised, self._registry, self._audit = server, supervised, registry, audit
        self._names = names
        self._places = Shares(CALLS, operator=operator, of_one=CALLS_OF_ONE)
        self._pinned = tuple[Tool, ...]()
        self.state: State = "starting"
        self._session: ToolSession | None = None
        # The names in the registry.
        self._listed: set[str] = set()
        self._said = ""

    async def look(self) -> None:
        """Read the names that the package pins now."""
        try:
            self._pinned = tuple((await tool_packages.pins(self.server.package, seconds=_READ_SECONDS)).values())
        except errors.CovenantError:
            return  # its session is refused for that
        except Exception:
            # One entry must not end the daemon.
            _LOG.exception("the package of tool server `%s` cannot be read", self.server.name)

    def claim(self) -> None:
        """Take the names that ``look`` found, as far as they are no earlier entry's."""
        for pin in self._pinned:
            if (name := self.server.listed_as(pin.name)) is not None:
                self._names.setdefault(name, self.server.name)

    async def run(self) -> None:
        """Hold sessions, one after the other."""
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            error = await self._hold()
            if self.state == "ready" and time.monotonic() - began >= _STEADY_SECONDS:
                pause = FIRST_PAUSE
            await self._lost(error)
            refused = self.state == "refused"
            await anyio.sleep(REFUSED_PAUSE if refused else pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Call a tool by the name that the endpoint has for it.

        Raises:
            errors.ToolError: there is no session now, or the call failed.
        """
        if self._session is None or self.state != "ready":
            raise errors.ToolError(
                f"tool server `{self.server.name}` does not run now", hint="covenant tools list shows its state"
            )
        result = await self._session.call(name, arguments)
        content = result.get("content")
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise errors.ToolError(f"tool server `{self.server.name}` answered without content")
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            # No frame carries half of a pair of surrogates, which JSON can name: the caller's connection would end.
            raise errors.ToolError(f"tool server `{self.server.name}` answered with text that is no Unicode") from None
        return Answer(tuple(content), result.get("isError") is True)

    async def _hold(self) -> errors.CovenantError:
        self._session = ToolSession(self.server.name)
        try:
            opened = tool_packages.opened(self.server.package, seconds=_READ_SECONDS)
            async with opened as (directory, pins):
                return await self._session.run(self._supervised, directory, functools.partial(self._show, pins))
        except errors.CovenantError as e:
            return e
        except Exception:
            # One entry must not end the daemon.
            _LOG.exception("tool server `%s` failed", self.server.name)
            return errors.InternalError("the daemon failed at this", hint="see its log")
        finally:
            self._session = None

    async def _show(self, pins: Mapping[str, Tool], found: Sequence[AdvertisedTool]) -> None:
        """Bring the registry to what the session lists of the pinned tools."""
        tools, unpinned = dict[str, McpTool](), list[str]()
        for one in found:
            pin = pins.get(one.name)
            if pin is None or (one.description, one.input_schema or {}) != (pin.description, pin.input_schema or {}):
                unpinned.append(one.name)
            elif (name := self.server.listed_as(pin.name)) is not None:
                if self._names.setdefault(name, self.server.name) != self.server.name:
                    _LOG.warning(
                        "tool `%s` of tool server `%s` was left out: the name is of `%s`",
                        *(name, self.server.name, self._names[name]),
                    )
                    continue
                if name in tools:
                    _LOG.warning("a second tool `%s` of tool server `%s` was ignored", name, self.server.name)
                tools.setdefault(name, McpTool(self, name, one.name, pin))
        if unpinned:
            names = ", ".join(f"`{visible(name[:_SHOWN_CHARACTERS])}`" for name in unpinned[:_SHOWN_NAMES])
            more = "" if len(unpinned) <= _SHOWN_NAMES else f" and {len(unpinned) - _SHOWN_NAMES} more"
            _LOG.warning(
                "tool server `%s`: tools that are not pinned were left out, %d: %s%s",
                *(self.server.name, len(unpinned), names, more),
            )
        self._remove()
        add = functools.partial(self._registry.add, places=self._places)
        self._listed = {name for name, tool in tools.items() if add(tool, seconds=tool.seconds)}
        self.state = "ready"
        await self._note("")

    async def _lost(self, error: errors.CovenantError) -> None:
        """Go on after the end of a session, or after a package was refused."""
        refused = isinstance(error, errors.RevokedError) or not isinstance(
            error, errors.MachineError | errors.RunError | errors.BusyError
        )
        self.state = "refused" if refused else "reconnecting"
        if refused:
            self._remove()
        if await self._note(error.code):
            _LOG.warning(
                "tool server `%s` is %s: %s%s",
                self.server.name,
                self.state,
                visible(error.message),
                f" (fix: {visible(error.hint)})" if error.hint else "",
            )

    def _remove(self) -> None:
        for name in self._listed:
            self._registry.remove(name)
        self._listed = set()

    async def _note(self, reason: str) -> bool:
        """Write the row of a change. Returns False where the last row says the same."""
        said = f"{self.state} {reason} {len(self._listed)}"
        if said == self._said:
            return False
        self._said = said
        row = {"server": self.server.name, "state": self.state, "tools": len(self._listed), "reason": reason}
        try:
            await self._audit.append("tool_server_changed", row)
        except errors.CovenantError as e:
            _LOG.error("a change of tool server `%s` is not in the log: %s", self.server.name, e)
        return True


class McpTool:
    """A tool of a server, as the registry calls it."""

    def __init__(self, kept: KeptServer, name: str, own: str, pin: Tool) -> None:
        self._kept, self._name, self._own, self._pin = kept, name, own, pin
        self.seconds = pin.timeout_ms / 1000 + _BEYOND_SECONDS

    @property
    def spec(self) -> ToolSpec:
        """Its pinned description and schema, its source and the state of that now."""
        return ToolSpec(
            name=self._name,
            description=self._pin.description,
            input_schema=self._pin.input_schema or {"type": "object"},
            source=self._kept.server.name,
            prefix=self._kept.server.tool_prefix or None,
            state=self._kept.state,
        )

    async def call(self, arguments: Mapping[str, Any]) -> Answer:
        """Call it."""
        return await self._kept.call(self._own, arguments)
