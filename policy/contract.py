"""The runtime contracts: how an agent is given its intent and how its answer is read.

`line` is the contract of the seed: one JSON line in, one JSON line out (covenant-agent-manifest.txt). `text` is for
programs that know nothing of Covenant. `stdio` and `terminal` are streams without an answer. Pure: builds the bytes of
stdin from values that are given, and reads the result from the bytes of stdout.
Limits are those of decisions.md, section Results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, get_args

from msgspec import Struct

from policy import errors

RESULT_BYTES = 4 * 1024 * 1024
STDOUT_BYTES = 16 * 1024 * 1024
STDERR_BYTES = 64 * 1024
INTENT_BYTES = 1024 * 1024
# What one argument of a program takes, without its NUL (execve(2), MAX_ARG_STRLEN).
ARGUMENT_BYTES = 128 * 1024 - 1
# Limits of the lists and objects in a result: depth and number. Each reader of the result recurses through it, and
# three bytes of an agent take 64 bytes of its memory.
RESULT_DEPTH = 64
RESULT_CONTAINERS = 65_536


class Intent(Struct, frozen=True):
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


class AgentResult(Struct, frozen=True):
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


def parse_text(stdout: bytes) -> AgentResult:
    """Read all of stdout as the text of the answer.

    Raises:
        errors.OutputTooLargeError: stdout is over 4 MiB.
        errors.MalformedOutputError: stdout is not UTF-8.
    """
    if len(stdout) > RESULT_BYTES:
        raise errors.OutputTooLargeError(f"stdout is over {RESULT_BYTES} bytes")
    try:
        return AgentResult(stdout.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise errors.MalformedOutputError(
            f"stdout is not valid UTF-8 at byte {e.start}, so it is no text",
            hint='print text, or set `contract = "stdio"` in [process], which passes every byte on',
        ) from e


# How the agent gets the intent's text: on stdin, in an argument of its command, or not at all.
IntentPlace = Literal["stdin", "argument", "none"]


class LineContract(Struct, frozen=True):
    """One JSON line in, one JSON line out. The agent must be silent until it has its line."""

    name: ClassVar[str] = "line"
    silent: ClassVar[bool] = True
    stdout_bytes: ClassVar[int] = STDOUT_BYTES

    def stdin(self, intent: Intent) -> bytes:
        """Return the intent line. Raises as ``Intent.line``."""
        return intent.line()

    def argument(self, intent: Intent) -> str | None:
        """Return None: no argument carries the intent."""
        return None

    def parse(self, stdout: bytes) -> AgentResult:
        """Return the answer. Raises as ``parse_result``."""
        return parse_result(stdout)


class TextContract(Struct, frozen=True):
    """The intent's text in, and all of stdout is the answer's text. The agent may write at any time."""

    name: ClassVar[str] = "text"
    silent: ClassVar[bool] = False
    stdout_bytes: ClassVar[int] = RESULT_BYTES
    intent: IntentPlace = "stdin"

    def stdin(self, intent: Intent) -> bytes:
        """Return the intent's text in UTF-8, or nothing where it is not given on stdin."""
        return intent.text.encode() if self.intent == "stdin" else b""

    def argument(self, intent: Intent) -> str | None:
        """Return the text where it stands in an argument.

        Raises:
            errors.UsageError: no argument can carry this text.
        """
        if self.intent != "argument":
            return None
        size = len(intent.text.encode())
        if size > ARGUMENT_BYTES:
            raise errors.UsageError(
                f"the intent is {size} bytes, an argument of a program takes {ARGUMENT_BYTES}",
                hint="take `{intent}` out of [process] args: the agent then reads the text on stdin",
            )
        if "\0" in intent.text:
            raise errors.UsageError(
                "the intent has a NUL character, which no argument can carry",
                hint="take the character out, or take `{intent}` out of [process] args",
            )
        return intent.text

    def parse(self, stdout: bytes) -> AgentResult:
        """Return the answer. Raises as ``parse_text``."""
        return parse_text(stdout)


class StreamContract(Struct, frozen=True):
    """A stream in both directions: pipes (`stdio`), or a terminal. It has no intent and no answer."""

    terminal: bool

    @property
    def name(self) -> str:
        """Return the name of the contract in the manifest."""
        return "terminal" if self.terminal else "stdio"

    def stdin(self, intent: Intent) -> bytes:
        """Return nothing: stdin is the caller's stream."""
        return b""

    def argument(self, intent: Intent) -> str | None:
        """Return None: a session has no intent."""
        return None

    def parse(self, stdout: bytes) -> AgentResult:
        """Return an empty answer: the stream went to the caller, and its exit status says how it ended."""
        return AgentResult("")


# A contract with an answer, and any contract.
Answering = LineContract | TextContract
Contract = Answering | StreamContract
LINE: Final = LineContract()
# How the caller of a run is connected to its agent.
Connected = Literal["nothing", "streams", "terminal"]
STREAMS: Final = ("stdio", "terminal")
_PLACES: Final[Mapping[str, IntentPlace]] = {place: place for place in get_args(IntentPlace)}


def check_caller(spoken: Contract, connected: Connected) -> None:
    """Refuse a run whose caller is not connected as its contract needs it.

    Raises:
        errors.ContractError: a stream without a caller, a terminal without a terminal, or an intent over a stream.
    """
    stream = isinstance(spoken, StreamContract)
    if not stream and connected != "nothing":
        raise errors.ContractError(
            f"the agent speaks `{spoken.name}`, which takes an intent and gives an answer, and no stream",
            hint='run it with its intent: `covenant run PACKAGE TEXT`; or set `contract = "stdio"` in [process]',
            where="process.contract",
        )
    if stream and connected == "nothing":
        raise errors.ContractError(
            f"the agent speaks `{spoken.name}`, a stream that needs a caller at its other end, and takes no intent",
            hint="run it without a TEXT: `covenant run PACKAGE`, or `covenant stdio PACKAGE` for an editor",
            where="process.contract",
        )
    if isinstance(spoken, StreamContract) and spoken.terminal and connected != "terminal":
        raise errors.ContractError(
            "the agent speaks `terminal`, and its caller has no terminal",
            hint='run it in a terminal: `covenant run PACKAGE`; or set `contract = "stdio"` in [process]',
            where="process.contract",
        )


def of(process: Mapping[str, Any] | None) -> Contract:
    """Return the contract that a compiled `process` section names; `line` where there is none.

    Raises:
        errors.InternalError: the section names a contract or a place of the intent that does not exist.
    """
    if process is None:
        return LINE
    name, place = process.get("contract"), _PLACES.get(str(process.get("intent")))
    if place is None:
        raise errors.InternalError(f"the compiled policy gives the intent at `{process.get('intent')}`")
    if name == "line":
        return LINE
    if name == "text":
        return TextContract(place)
    if name in STREAMS:
        return StreamContract(name == "terminal")
    raise errors.InternalError(f"the compiled policy names the contract `{name}`")


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
