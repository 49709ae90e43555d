"""The tools of this host: the two native ones, and the interface for others.

A tool has a specification in the format of the Model Context Protocol, and answers calls. For any implementation (a
function here, later a server of that protocol or a sandboxed package) the registry first checks the arguments against
the tool's full schema (JSON Schema 2020-12), and limits the time of a call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import anyio
import anyio.to_thread
import jsonschema_rs

from covenant.fair_share import Shares
from covenant.wire.types import ToolSpec
from policy import errors
from policy.manifest.tools import argument_schema

_LOG: Final = logging.getLogger(__name__)

SECONDS: Final = 30.0
_SHOWN: Final = 120


class Answer(NamedTuple):
    """A tool's answer: blocks of content. ``is_error``: they describe an error of the tool."""

    content: tuple[dict[str, Any], ...]
    is_error: bool = False


class Tool(Protocol):
    """One tool. ``call`` gets arguments that fit the schema, and may raise; it must end when it is cancelled."""

    @property
    def spec(self) -> ToolSpec:
        """Its name, description and arguments."""

    async def call(self, arguments: Mapping[str, Any]) -> Answer:
        """Run the tool."""


@dataclass(frozen=True, slots=True)
class _Known:
    tool: Tool
    check: jsonschema_rs.Draft202012Validator
    seconds: float
    places: Shares | None = None

    @property
    def spec(self) -> ToolSpec:
        """The specification as it is now: a tool's state changes."""
        return self.tool.spec


class ToolRegistry:
    """Tools by name. The first of a name stays: a later one must not replace it."""

    def __init__(self, tools: Iterable[Tool] = (), *, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._known: dict[str, _Known] = {}
        for tool in tools:
            self.add(tool)

    def add(self, tool: Tool, *, seconds: float | None = None, places: Shares | None = None) -> bool:
        """Register a tool; returns False, with a warning in the log, if its name is taken or its schema is invalid.

        A schema is also invalid if it refers to another document, or has a pattern that the linear engine lacks.
        ``seconds`` is the time of a call, instead of that of the registry. ``places`` are those of calls under way,
        which the tool may share with others.
        """
        spec = tool.spec
        if spec.name in self._known:
            _LOG.warning("a second tool `%s` was ignored", spec.name)
            return False
        try:
            check = argument_schema.compiled(spec.input_schema)
        except (jsonschema_rs.ValidationError, errors.MalformedRequestError) as e:
            _LOG.warning("tool `%s` was ignored: its schema is invalid: %s", spec.name, e.message[:_SHOWN])
            return False
        self._known[spec.name] = _Known(tool, check, self._seconds if seconds is None else seconds, places)
        return True

    def remove(self, name: str) -> None:
        """Remove a tool. A call of it that is under way goes on."""
        self._known.pop(name, None)

    def __contains__(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return name in self._known

    def specs(self) -> list[ToolSpec]:
        """Return all specifications, sorted by name."""
        return [self._known[name].spec for name in sorted(self._known)]

    async def check(self, name: str, arguments: Any) -> None:
        """Check arguments against the tool's schema.

        Raises:
            errors.NoToolError: there is no such tool.
            errors.ToolArgumentsError: they do not fit; ``where`` is the JSON pointer of the misfit. The error does not
                contain the arguments.
        """
        known = self._find(name)
        await anyio.to_thread.run_sync(argument_schema.check, name, known.spec.input_schema, known.check, arguments)

    async def call(self, name: str, arguments: Mapping[str, Any], *, caller: str = "") -> Answer:
        """Check the arguments and call the tool for the caller with this public key.

        Raises:
            errors.NoToolError, errors.ToolArgumentsError: as ``check``.
            errors.BusyError: the caller has as many calls under way as it may, or all callers have.
            errors.ToolError: it failed, or did not answer in time.
        """
        known = None
        while known is not (now := self._find(name)):
            # Again where another tool took the name meanwhile: its package was replaced.
            known = now
            await self.check(name, arguments)
        try:
            # At once or not at all: the right to a call could end while the call waits for its place.
            places = contextlib.nullcontext() if known.places is None else known.places.place_now(caller)
            with places, anyio.fail_after(known.seconds):
                return await known.tool.call(arguments)
        except anyio.WouldBlock:
            raise _busy(known) from None
        except TimeoutError:
            raise errors.ToolError(f"tool `{name}` gave no answer in {known.seconds:g} seconds") from None
        except errors.CovenantError:
            raise
        except Exception as e:
            _LOG.exception("tool `%s` failed", name)
            raise errors.ToolError(f"tool `{name}` failed", hint="the daemon's log says how") from e

    def _find(self, name: str) -> _Known:
        known = self._known.get(name)
        if known is None:
            raise errors.NoToolError(f"there is no tool `{name[:_SHOWN]}`", hint="covenant tools list")
        return known


def _busy(known: _Known) -> errors.BusyError:
    assert known.places is not None
    server = known.spec.source or known.spec.name
    return errors.BusyError(
        f"too many calls of `{server}` are under way; one caller has at most {known.places.of_one}, and no "
        "more than are free",
        hint="ask again when one of them has ended",
    )


# The native tools -------------------------------------------------------------------------------------------------


class Echo:
    """Returns the text of its argument."""

    spec: Final = ToolSpec(
        name="echo",
        description="Say the text again.",
        input_schema={
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    )

    async def call(self, arguments: Mapping[str, Any]) -> Answer:
        """Return the text."""
        return Answer(({"type": "text", "text": arguments["text"]},))


class Clock:
    """Returns the daemon's time."""

    spec: Final = ToolSpec(
        name="clock",
        description='Say the time: {"epoch_ms": Unix milliseconds}.',
        input_schema={"type": "object", "properties": {}, "additionalProperties": False},
    )

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now = now_ms

    async def call(self, arguments: Mapping[str, Any]) -> Answer:
        """Return JSON in a text, as servers of the protocol return structured data."""
        return Answer(({"type": "text", "text": f'{{"epoch_ms": {self._now()}}}'},))


def native(now_ms: Callable[[], int]) -> ToolRegistry:
    """Return a registry with the native tools."""
    return ToolRegistry([Echo(), Clock(now_ms)])
