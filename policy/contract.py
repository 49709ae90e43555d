"""The runtime contract of the seed: one JSON line in, one JSON line out (covenant-agent-manifest.txt).

Pure: builds the intent line from values that are given and reads the result from the bytes of stdout.
Limits are those of decisions.md, section Results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policy import errors

RESULT_BYTES = 4 * 1024 * 1024
STDOUT_BYTES = 16 * 1024 * 1024
STDERR_BYTES = 64 * 1024
INTENT_BYTES = 1024 * 1024
# Limits of the lists and objects in a result: depth and number. Each reader of the result recurses through it, and
# three bytes of an agent take 64 bytes of its memory.
RESULT_DEPTH = 64
RESULT_CONTAINERS = 65_536


@dataclass(frozen=True, slots=True)
class Intent:
    """The intent for an agent. ``issued_at`` is in Unix milliseconds."""

    id: str
    text: str
    issuer: Mapping[str, str]
    issued_at: int
    priority: str = "normal"
    parent: str | None = None

    def line(self) -> bytes:
        """The one line that goes to stdin.

        Raises:
            errors.UsageError: over 1 MiB, or not encodable as UTF-8.
        """
        document = {
            "id": self.id,
            "text": self.text,
            "issuer": dict(self.issuer),
            "issued_at": self.issued_at,
            "priority": self.priority,
            "parent": self.parent,
        }
        try:
            line = json.dumps(document, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError as e:
            raise errors.UsageError("the intent's text is not valid Unicode") from e
        if len(line) > INTENT_BYTES:
            raise errors.UsageError(f"the intent is {len(line)} bytes, at most {INTENT_BYTES} are taken")
        return line


def on_behalf(display: str, pubkey: str, *, by: str) -> dict[str, str]:
    """Return the issuer that an agent reads when ``by`` asks on behalf of another: ``ada@laptop.via.uid990``.

    The kernel gives the part behind the last ``.via.``. So a chosen name cannot pass for the operator at the command
    line (``operator@local``), for another caller, or for an agent (``<id>@<run id>``).
    """
    return {"display": f"{display}.via.{by.partition('@')[0]}", "pubkey": pubkey}


@dataclass(frozen=True, slots=True)
class Usage:
    """The measured use of a run, from its intent to its end; None where this machine does not count it.

    ``cpu_ms`` is the processor time of the whole sandbox and of the runs that it started and that ended before it or
    with it, ``memory_peak_bytes`` the most that the sandbox held at one time, its start included, ``wall_ms`` the time
    by the clock, None of a run whose keeper was killed. A run that was never given its intent has used nothing.
    """

    cpu_ms: int | None = 0
    memory_peak_bytes: int | None = 0
    wall_ms: int | None = 0

    def with_below(self, cpu_ms: int) -> Usage:
        """The same with the processor time of those that it started."""
        return self if self.cpu_ms is None else dataclasses.replace(self, cpu_ms=self.cpu_ms + cpu_ms)


NOTHING_USED = Usage()


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The answer of an agent. ``files`` and ``runtime_events`` are version 1's, kept as they came."""

    text: str
    sources: tuple[str, ...] = ()
    files: tuple[Any, ...] = ()
    runtime_events: tuple[Any, ...] = ()


def parse_result(stdout: bytes) -> AgentResult:
    """Read the only non-empty line of stdout.

    Raises:
        errors.OutputTooLargeError: the line is over 4 MiB, has more than 65,536 lists and objects, or stdout is over
            16 MiB.
        errors.MalformedOutputError: anything else than one JSON object with a string ``text``.
    """
    if len(stdout) > STDOUT_BYTES:
        raise errors.OutputTooLargeError(f"stdout is over {STDOUT_BYTES} bytes")
    # Not split into lines: 16 MiB of short ones would be 300 MiB of objects.
    line = stdout.strip()
    if not line:
        raise errors.MalformedOutputError("stdout is empty", hint="print one JSON line with a `text` field")
    if b"\n" in line:
        raise errors.MalformedOutputError(
            "stdout has more than one non-empty line, the contract is one",
            hint="print anything else to stderr",
        )
    if len(line) > RESULT_BYTES:
        raise errors.OutputTooLargeError(f"the result line is over {RESULT_BYTES} bytes")
    return _result(_decode(line))


def _decode(line: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> object:
        raise ValueError(f"{constant} is not JSON")

    try:
        document = json.loads(line.decode("utf-8"), parse_constant=refuse)
        # json.loads takes these, and no JSON can carry them on: a lone surrogate, and a number such as 1e999, which it
        # makes an infinity of.
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeError as e:
        raise errors.MalformedOutputError("the result is not valid UTF-8") from e
    except (ValueError, RecursionError) as e:
        raise errors.MalformedOutputError("the result line is not JSON") from e
    if not isinstance(document, dict):
        raise errors.MalformedOutputError("the result line is not a JSON object")
    # More than one of these there is for each list and object, those in texts among them.
    if line.count(b"[") + line.count(b"{") > RESULT_DEPTH:
        _bounded(document)
    return document


def _bounded(document: dict[str, Any]) -> None:
    """Level by level, since what goes down by calls would be what this is to spare others."""
    level: list[Any] = [document]
    count = 0
    for _ in range(RESULT_DEPTH):
        count += len(level)
        if count > RESULT_CONTAINERS:
            raise errors.OutputTooLargeError(f"the result has more than {RESULT_CONTAINERS} lists and objects")
        values = (value for one in level for value in (one.values() if isinstance(one, dict) else one))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise errors.MalformedOutputError(f"the result is nested more than {RESULT_DEPTH} deep")


def _result(document: Mapping[str, Any]) -> AgentResult:
    text, sources = document.get("text"), document.get("sources", [])
    if not isinstance(text, str):
        raise errors.MalformedOutputError("the result has no string `text`")
    if not isinstance(sources, list) or not all(isinstance(s, str) for s in sources):
        raise errors.MalformedOutputError("`sources` of the result is not a list of strings")
    extra: dict[str, tuple[Any, ...]] = {}
    for key in ("files", "runtime_events"):
        value = document.get(key, [])
        if not isinstance(value, list):
            raise errors.MalformedOutputError(f"`{key}` of the result is not a list")
        extra[key] = tuple(value)
    return AgentResult(text, tuple(sources), extra["files"], extra["runtime_events"])
