"""Hold each call of a package's tools to its manifest: check it, log it, and only then let it be sent."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jsonschema_rs
from jsonschema_rs import Draft202012Validator
from msgspec import Struct

from policy import errors
from policy.denials import Bounds, Denial, Row
from policy.grants.skills import SkillSet
from policy.leases import targets
from policy.manifest import text
from policy.manifest.tools import argument_schema
from policy.manifest.tools.document import Server, Tool, ToolManifest
from policy.rules import tool_calls
from policy.rules.tool_calls import Refusal

# What a server's result may hold. Other keys, such as a request for input, are dropped: a server asks for nothing.
RESULT_KEYS: Final = ("content", "structuredContent", "isError")

# Keywords of a schema that say which further arguments there are.
_OPEN: Final = frozenset({
    "additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "$dynamicRef", "allOf", "anyOf",
    "oneOf", "if", "dependentSchemas",
})  # fmt: skip

Log = Callable[[str, Mapping[str, Any]], None]


class AllowedCall(Struct, frozen=True):
    """A call that was checked and written down. It may take ``seconds`` from when it is sent."""

    id: str
    uri: str
    server: Server
    tool: Tool
    arguments: Mapping[str, Any]
    began: float
    seconds: float


class ToolGuard:
    """Decide and log the calls of one package. ``log`` writes an event durably, or raises.

    ``skills`` are the effective grants. ``closed`` are tools that this run does not have although they are granted, by
    their URIs with the reason. ``clock`` is monotonic.
    """

    def __init__(
        self,
        skills: SkillSet,
        tools: ToolManifest,
        log: Log,
        *,
        closed: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._skills, self._tools, self._log, self._clock = skills, tools, log, clock
        self._closed = closed
        self._rate = tool_calls.CallRate(skills)
        # A client may be refused as often as it asks; its rows are as few as those of a run's denials.
        self._bounds = Bounds()
        self._validators: dict[str, Draft202012Validator] = {}

    def prepare(self) -> None:
        """Compile the schemas of the granted tools. A schema that is none is refused when its tool is called."""
        for server in self._tools.servers:
            for tool in server.tools:
                if self.allows(uri := str(server.uri(tool))) and tool.input_schema is not None:
                    with contextlib.suppress(errors.ToolArgumentsError):
                        self._validator(uri, tool, tool.input_schema)

    def allows(self, uri: str) -> bool:
        """Whether some call of the tool is granted: whether it is listed at all."""
        found = tool_calls.find(self._tools, uri)
        if found is None or found[1].input_schema is None or uri in self._closed:
            return False
        effect = found[1].side_effect_class
        granted = self._skills.allow.holds(uri) and self._skills.side_effects.holds(effect)
        return granted and effect in self._tools.allowed_side_effects

    def asks(self, uri: str) -> bool:
        """Whether an operator is asked about each call of the tool."""
        return uri in self._skills.asked

    def question(self, uri: str, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Return what an operator is asked about a call that may be made but for that: no other call is asked about.

        Raises: as ``check``.
        """
        _, tool = self._consider(uri, arguments)
        if (refusal := self._rate.spent(uri)) is not None:
            self._refuse(uri, arguments, refusal)
        raw = tool_calls.encoded(arguments)
        return {
            "uri": uri,
            "side_effect_class": tool.side_effect_class,
            "arguments_hash_hex": hashlib.sha256(raw).hexdigest(),
            "arguments": targets.view(raw.decode("ascii"), len(raw)),
        }

    def unknown(self, alias: str, name: str, arguments: Mapping[str, Any]) -> None:
        """Write the refusal of a call whose server or tool is not in tools.json. The name is the client's."""
        uri = f"matrix://tool/mcp/{text.visible(alias, 64) or '?'}/{text.visible(name, 64)}@?"
        self._write_refusal(uri, arguments, Denial("tool", uri, "unknown_tool"))

    def unapproved(self, uri: str, arguments: Mapping[str, Any]) -> errors.ToolDeniedError:
        """Write the refusal of a call that no operator let pass, and return it."""
        refusal = tool_calls.unapproved(uri)
        self._write_refusal(uri, arguments, refusal.denial)
        return _denied(refusal)

    def check(
        self, uri: str, arguments: Mapping[str, Any], *, seconds: float | None = None, approved: bool = False
    ) -> AllowedCall:
        """Return the call, which is in the log now. ``seconds`` may shorten its time.

        Without ``approved`` a call that an operator is asked about is refused.

        Raises:
            errors.ToolDeniedError: the manifest does not allow it; the refusal is in the log.
            errors.ToolArgumentsError: the arguments do not fit the tool's input schema; so is that.
            errors.UsageError: tools.json has no input schema of it.
        """
        server, tool = self._consider(uri, arguments)
        if self.asks(uri) and not approved:
            raise self.unapproved(uri, arguments)
        now = self._clock()
        if (refusal := self._rate.take(uri, now)) is not None:
            self._refuse(uri, arguments, refusal)
        most = tool_calls.call_ms(self._skills, tool) / 1000
        most = most if seconds is None else min(most, seconds)
        call = AllowedCall(uuid.uuid4().hex, uri, server, tool, arguments, now, most)
        self._log("tool_called", {**self._about(uri, arguments), "call": call.id})
        return call

    def _consider(self, uri: str, arguments: Mapping[str, Any]) -> tuple[Server, Tool]:
        """Check a call by all but its rate and an operator. Raises: as ``check``."""
        refusal = tool_calls.before(self._skills, self._tools, uri, arguments)
        if refusal is not None:
            self._refuse(uri, arguments, refusal)
        if uri in self._closed:
            self._refuse(uri, arguments, tool_calls.not_offered(uri, self._closed[uri]))
        found = tool_calls.find(self._tools, uri)
        assert found is not None
        server, tool = found
        if tool.input_schema is None:
            raise errors.UsageError(
                f"`{uri}` has no input_schema in tools.json, so that no argument can be checked",
                hint=f"write the one that `covenant tools advertised PACKAGE {server.alias}` prints, then pin",
            )
        try:
            self._fits(uri, tool, tool.input_schema, arguments)
        except errors.ToolArgumentsError:
            self._write_refusal(uri, arguments, Denial("tool", uri, "schema"))
            raise
        return server, tool

    def _fits(self, uri: str, tool: Tool, schema: dict[str, Any], arguments: Mapping[str, Any]) -> None:
        argument_schema.check(tool.name, schema, self._validator(uri, tool, schema), dict(arguments))
        _check_names(tool, schema, arguments)

    def _validator(self, uri: str, tool: Tool, schema: dict[str, Any]) -> Draft202012Validator:
        found = self._validators.get(uri)
        if found is None:
            try:
                found = self._validators[uri] = argument_schema.compiled(schema)
            except (jsonschema_rs.ValidationError, errors.MalformedRequestError) as e:
                raise errors.ToolArgumentsError(
                    f"the input_schema of `{tool.name}` is no schema that can be checked: {e.message}",
                    hint="its server must advertise another",
                ) from None
        return found

    def answered(self, call: AllowedCall, result: Any, size: int) -> dict[str, Any]:
        """Write the end of a call, and return its result with the keys that a tool may answer with.

        Raises:
            errors.ToolDeniedError: the answer is larger than allowed.
            errors.ToolServerError: it is no result of a tool.
        """
        kept = {key: result[key] for key in RESULT_KEYS if key in result} if isinstance(result, dict) else {}
        content = kept.get("content")
        if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
            self._end(call, "failed", "malformed")
            raise errors.ToolServerError(f"the answer of `{call.uri}` has no content")
        refusal = tool_calls.after(self._skills, call.uri, size)
        if refusal is not None:
            self._end(call, "failed", refusal.denial.code, size=size)
            raise _denied(refusal)
        raw = tool_calls.encoded(kept)
        is_error = kept.get("isError") is True
        self._end(call, "tool_error" if is_error else "ok", None, size=size, digest=hashlib.sha256(raw).hexdigest())
        return kept

    def failed(self, call: AllowedCall, code: str) -> None:
        """Write the end of a call that has no answer."""
        self._end(call, "failed", code)

    def late(self, call: AllowedCall) -> errors.ToolDeniedError:
        """Write the end of a call whose time is over, and return the denial."""
        refusal = tool_calls.late(self._skills, self._tools, call.uri)
        self._end(call, "failed", refusal.denial.code)
        return _denied(refusal)

    def _refuse(self, uri: str, arguments: Mapping[str, Any], refusal: Refusal) -> NoReturn:
        self._write_refusal(uri, arguments, refusal.denial)
        raise _denied(refusal)

    def _write_refusal(self, uri: str, arguments: Mapping[str, Any], denial: Denial) -> None:
        rows = self._bounds.told(denial, now_ms=self._now_ms())
        about = self._about(uri, arguments)
        for row in rows:
            self._log("tool_refused", {**about, **_named(row)})
        self._summarize(self._bounds.due(now_ms=self._now_ms()))

    def close(self) -> None:
        """Write the refusals that have no row yet. Called at the end of a session."""
        self._summarize(self._bounds.wind_up())

    def _summarize(self, rows: Iterable[Row]) -> None:
        nothing = {"side_effect_class": None, "arguments_hash_hex": None, "argument_bytes": 0}
        for row in rows:
            uri = row.denial.target.partition(" ")[0]
            about = {"agent_id": self._tools.agent_id, "uri": text.visible(uri, 512), **nothing}
            self._log("tool_refused", {**about, **_named(row)})

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _about(self, uri: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        raw, found = tool_calls.encoded(arguments), tool_calls.find(self._tools, uri)
        return {
            "agent_id": self._tools.agent_id,
            "uri": text.visible(uri, 512),
            "side_effect_class": None if found is None else found[1].side_effect_class,
            "arguments_hash_hex": hashlib.sha256(raw).hexdigest(),
            "argument_bytes": len(raw),
        }

    def _end(
        self, call: AllowedCall, status: str, code: str | None, *, size: int = 0, digest: str | None = None
    ) -> None:
        self._log(
            "tool_answered",
            {
                "agent_id": self._tools.agent_id,
                "uri": call.uri,
                "call": call.id,
                "status": status,
                "code": code,
                "answer_hash_hex": digest,
                "answer_bytes": size,
                "duration_ms": max(0, int((self._clock() - call.began) * 1000)),
            },
        )


def _named(row: Row) -> dict[str, Any]:
    return {"denial": row.denial.id, "code": row.denial.code, "grant": row.denial.grant, "count": row.count}


def _denied(refusal: Refusal) -> errors.ToolDeniedError:
    return errors.ToolDeniedError(refusal.message, hint=refusal.fix(), denial=refusal.denial.id, add=list(refusal.add))


def _check_names(tool: Tool, schema: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    known = schema.get("properties")
    # A schema that says nothing of further arguments takes any. Here those that it names are all there are.
    if _OPEN.isdisjoint(schema) and isinstance(known, dict) and (extra := sorted(arguments.keys() - known)):
        raise errors.ToolArgumentsError(
            f"arguments: {text.quote(extra[0])} is not in the schema of `{tool.name}`",
            hint=f"it takes {', '.join(map(text.quote, known)) or 'none'}",
            where="/",
        )
