"""Calls of commands (``[[tools.command]]``): each is a child of the run, which gets nothing of the agent but bytes.

    service gate -> name, arguments, stdin -> [ the run's shim: rules, rate, log ] -> the child's shim
    service gate <- exit status, stdout, stderr <- [ the run's shim ] <- pipes <- the child's shim

The line's other end is the process that reads the agent's HTTP, so what comes is hostile: bounded, read strictly, and
decided here by the run's own grants. The program is started by the package that the grant names, with the environment
of that package; the agent chooses its arguments, within the rules, and its stdin.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct

from policy import denials, errors
from policy.denials import Bounds, Denial
from policy.grants.skills import SkillSet
from policy.leases import targets
from policy.manifest import text
from policy.manifest.tools import command
from policy.rules import command_calls, tool_calls
from policy.rules.tool_calls import Refusal
from policy.signing import strict_json
from sandbox.broker.children import ChildManager, CommandStreams
from sandbox.broker.gate_line import GateLine
from sandbox.broker.server import Broker
from sandbox.network.tools.questions import HoldTerms
from sandbox.rate_limit import Tokens

# Calls at one time; each is a sandbox.
AT_ONCE: Final = 16
LINE_BYTES: Final = 10 << 20
# A pipe holds a whole stdin, so that nothing has to write it piece by piece (fcntl(2), F_SETPIPE_SZ).
STDIN_BYTES: Final = 1 << 20
# One argument of a program (execve(2), MAX_ARG_STRLEN), and all of them, which gVisor tells of in one message.
WORD_BYTES, WORDS_BYTES, WORDS = 128 * 1024 - 1, 96 * 1024, 256
OUTPUT_BYTES: Final = 4 << 20
# Calls that are decided in a second and at once: a refused one costs the shim the rules of its arguments.
PER_SECOND, BURST = 16.0, 64.0
_CHUNK: Final = 1 << 16

Log = Callable[[str, Mapping[str, Any]], None]


@dataclass
class _Call:
    number: int
    uri: str
    id: str
    began: float
    run_id: str = ""
    output: dict[str, bytearray] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    said: Mapping[str, Any] | None = None
    over: str = ""


class CommandTerms(Struct, frozen=True):
    """The commands of a run: its grants, its agent, and its log.

    ``log`` writes an event, ``sync`` makes all durable, and ``denied`` is called for each refusal.
    """

    skills: SkillSet
    agent_id: str
    log: Log
    sync: Callable[[], None]
    denied: denials.Told


class CommandDesk:
    """Serve the commands of one run. ``gate_end`` is the service gate's end of the line; ``started`` closes it here."""

    def __init__(
        self,
        terms: CommandTerms,
        children: ChildManager,
        broker: Broker,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terms, self._skills, self._children, self._broker = terms, terms.skills, children, broker
        self._clock = clock
        self._rate, self._bounds = tool_calls.CallRate(terms.skills), Bounds()
        self._asked = Tokens(PER_SECOND, BURST, clock())
        self._calls: dict[int, _Call] = {}
        self._hold: HoldTerms | None = None
        self._held: set[int] = set()
        self._in = bytearray()
        self._line = GateLine(broker, self._taken, self._gone)
        broker.add({}, begin=self._line.begin, close=self.close, look=self._line.look)

    @property
    def gate_end(self) -> int:
        """Return the gate's descriptor."""
        return self._line.gate_end

    def started(self) -> None:
        """Close the gate's end here: the gate has it."""
        self._line.started()

    def hold_by(self, hold: HoldTerms) -> None:
        """Hold calls that an operator is asked about. Without it they are refused."""
        self._hold = hold

    def close(self) -> None:
        """End with the run: write the rows of calls that are under way, and release what they hold."""
        self._held.clear()
        for one in list(self._calls.values()):
            self._ended(one, {"error": {"code": "run_ended", "message": "the run has ended"}})
        self._summarise(self._bounds.wind_up())
        self._line.close()

    # --- the line -------------------------------------------------------------------------------------

    def _taken(self, data: bytes) -> None:
        self._in += data
        *lines, rest = bytes(self._in).split(b"\n") if b"\n" in data else (bytes(self._in),)
        self._in = bytearray(rest)
        for line in lines:
            if not self._line.is_open or not self._message(line):
                self._line.hang_up()  # an honest gate sends none of this
                return
        if len(self._in) > LINE_BYTES:
            self._line.hang_up()

    def _message(self, line: bytes) -> bool:
        """Take one message. Returns False for what no honest gate sends."""
        found = read(line)
        if found is None:
            return False
        number, name, argv, stdin = found
        if name is None:
            self._held.discard(number)
            if (call := self._calls.get(number)) is not None:
                self._end(call, "cancelled")
            return True
        if number in self._calls or number in self._held:
            return False
        self._take(number, name, argv, stdin)
        return True

    def _reply(self, number: int, said: Mapping[str, Any]) -> None:
        self._line.send(json.dumps({"id": number, **said}, separators=(",", ":")).encode() + b"\n")

    def _gone(self) -> None:
        self._held.clear()
        for one in self._calls.values():
            self._end(one, "cancelled")

    # --- calls ----------------------------------------------------------------------------------------

    def _take(self, number: int, name: str, argv: list[str], stdin: bytes) -> None:
        if not self._asked.take(self._clock()):
            uri = command.uri(text.visible(name, 64), "?")
            message = f"{PER_SECOND:g} calls of commands a second are taken at most"
            self._refuse(number, [], Refusal(Denial("tool", uri, "too_many_requests"), message, hint="call it again"))
            return
        refusal = command_calls.before(self._skills, name, argv, len(stdin)) or self._beyond(name, argv, stdin)
        if refusal is not None:
            self._refuse(number, argv, refusal)
            return
        agent = command_calls.agent_of(self._skills, name)
        assert agent is not None
        uri = command.uri(name, agent)
        if uri in self._skills.asked:
            self._ask(number, uri, argv, stdin)
        else:
            self._make(number, uri, argv, stdin)

    def _ask(self, number: int, uri: str, argv: list[str], stdin: bytes) -> None:
        """Hold a call for an operator. The lease is for the command with these arguments and this stdin."""
        if (refusal := self._rate.spent(uri)) is not None:
            self._refuse(number, argv, refusal)
            return
        hold, raw = self._hold, tool_calls.encoded({"argv": argv, "stdin": base64.b64encode(stdin).decode()})
        if hold is None or len(self._held) >= AT_ONCE:
            self._refuse(number, argv, tool_calls.unapproved(uri))
            return
        target = targets.call(uri, hashlib.sha256(raw).hexdigest())
        self._held.add(number)

        def then(granted: bool) -> None:
            if number not in self._held:
                return  # its client is gone, and it uses no lease
            self._held.discard(number)
            if not granted or hold.desk.seconds("tool", target) is None:
                self._refuse(number, argv, tool_calls.unapproved(uri))
                return
            hold.desk.used("tool", target)
            self._make(number, uri, argv, stdin)

        most = targets.SHOWN_CHARACTERS
        said = json.dumps({"argv": argv, "stdin": stdin[:most].decode("utf-8", "backslashreplace")})
        arguments = targets.view(said, len(raw), more=len(stdin) > most)
        hold.desk.ask("tool", target, hold.seconds, then, side_effect="shell", arguments=arguments)

    def _make(self, number: int, uri: str, argv: list[str], stdin: bytes) -> None:
        refusal = self._crowded(uri) or self._rate.take(uri, self._clock())
        if refusal is not None:
            self._refuse(number, argv, refusal)
            return
        call = _Call(number, uri, uuid.uuid4().hex, self._clock())
        self._terms.log("tool_called", {**self._about(call.uri, argv), "call": call.id})
        self._terms.sync()
        self._calls[number] = call
        try:
            self._start(call, argv, stdin)
        except (OSError, errors.CovenantError) as e:
            code, message = (e.code, e.message) if isinstance(e, errors.CovenantError) else ("kernel_error", str(e))
            hint = e.hint if isinstance(e, errors.CovenantError) else ""
            self._ended(call, {"error": {"code": code, "message": message, "hint": hint}})

    def _beyond(self, name: str, argv: list[str], stdin: bytes) -> Refusal | None:
        """The refusal of what no program can be started with, or of one call too many."""
        uri = command.uri(name, command_calls.agent_of(self._skills, name) or "")
        sizes = [len(one.encode("utf-8", "surrogatepass")) for one in argv]
        if any("\0" in one for one in argv) or max(sizes, default=0) > WORD_BYTES or sum(sizes) > WORDS_BYTES:
            hint = f"an argument has no NUL, and all have {WORDS_BYTES} bytes at most: give the rest on stdin"
            return Refusal(Denial("tool", uri, denials.ARGUMENTS), "no program takes these arguments", hint=hint)
        if len(stdin) > STDIN_BYTES:
            message = f"stdin has {len(stdin)} bytes, a command takes {STDIN_BYTES}"
            return Refusal(Denial("tool", uri, "argument_bytes"), message, hint="give less at once")
        return self._crowded(uri)

    def _crowded(self, uri: str) -> Refusal | None:
        """The refusal of a call while as many run as may."""
        if len(self._calls) >= AT_ONCE:
            message = f"{AT_ONCE} commands run, and no more at one time"
            return Refusal(Denial("tool", uri, "too_many_requests"), message, hint="wait until one has ended")
        return None

    def _start(self, call: _Call, argv: list[str], stdin: bytes) -> None:
        bound = command.bound(call.uri)
        assert bound is not None
        with contextlib.ExitStack() as theirs:
            ends = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
            (stdin_read, stdin_write), (out_read, out_write), (err_read, err_write) = ends
            for fd in (stdin_read, out_write, err_write):
                theirs.callback(os.close, fd)
            try:
                fcntl.fcntl(stdin_write, fcntl.F_SETPIPE_SZ, max(len(stdin), 4096))
                os.set_blocking(stdin_write, False)
                if stdin and os.write(stdin_write, stdin) != len(stdin):
                    raise OSError("a pipe does not take the whole of stdin")
            finally:
                os.close(stdin_write)
            for name, fd in (("stdout", out_read), ("stderr", err_read)):
                os.set_blocking(fd, False)
                call.ends[name] = fd
                call.output[name] = bytearray()
                self._broker.watch(fd, functools.partial(self._on_output, call, name))
            streams = CommandStreams(tuple(argv), stdin_read, out_write, err_write)
            call.run_id = self._children.run_command(
                bound[1], streams, timeout_ms=self._skills.call_ms, done=functools.partial(self._said, call)
            )

    def _on_output(self, call: _Call, name: str) -> None:
        fd = call.ends[name]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            del call.ends[name]
            self._broker.forget(fd)
            os.close(fd)
            self._settle(call)
            return
        if call.over:
            return  # it is being ended: the pipe is emptied, and nothing more is kept
        call.output[name] += data
        most = min(self._skills.answer_bytes or OUTPUT_BYTES, OUTPUT_BYTES)
        if sum(map(len, call.output.values())) > most:
            self._end(call, "answer_bytes")

    def _said(self, call: _Call, said: Mapping[str, Any]) -> None:
        call.said = said
        self._settle(call)

    def _settle(self, call: _Call) -> None:
        """Answer once the outcome is there and both streams are at their end."""
        if call.said is not None and (not call.ends or "error" in call.said):
            self._ended(call, call.said)

    def _end(self, call: _Call, why: str) -> None:
        """End a call that is under way."""
        call.over = call.over or why
        if call.run_id:
            self._children.end_command(call.run_id, signal.SIGTERM)

    def _ended(self, call: _Call, said: Mapping[str, Any]) -> None:
        if self._calls.pop(call.number, None) is None:
            return
        for fd in call.ends.values():
            self._broker.forget(fd)
            os.close(fd)
        code = call.over or (None if "ok" in said else said["error"]["code"])
        if code == "answer_bytes":
            said = {"error": self._too_large(call)}
        elif "ok" in said:
            streams = {name: base64.b64encode(data).decode() for name, data in call.output.items()}
            said = {"ok": {"status": said["ok"]["status"], **streams}}
        whole = b"".join(call.output.values())
        self._terms.log(
            "tool_answered",
            {
                "agent_id": self._terms.agent_id,
                "uri": call.uri,
                "call": call.id,
                "status": "ok" if code is None else "failed",
                "code": code,
                "answer_hash_hex": hashlib.sha256(whole).hexdigest() if code is None else None,
                "answer_bytes": len(whole),
                "duration_ms": max(0, int((self._clock() - call.began) * 1000)),
            },
        )
        self._reply(call.number, said)

    def _too_large(self, call: _Call) -> dict[str, str]:
        size = sum(map(len, call.output.values()))
        refusal = tool_calls.after(self._skills, call.uri, size)
        self._terms.denied(Denial("tool", call.uri, "answer_bytes"))
        message = f"its output has more than {OUTPUT_BYTES} bytes" if refusal is None else refusal.message
        return {"code": "answer_bytes", "message": message, "hint": "" if refusal is None else refusal.fix()}

    # --- refusals -------------------------------------------------------------------------------------

    def _refuse(self, number: int, argv: list[str], refusal: Refusal) -> None:
        about, now = self._about(refusal.denial.target.partition(" ")[0], argv), int(self._clock() * 1000)
        for row in self._bounds.told(refusal.denial, now_ms=now):
            self._terms.log("tool_refused", {**about, **_named(row)})
        self._summarise(self._bounds.due(now_ms=now))
        self._terms.denied(refusal.denial)
        error = {"code": refusal.denial.code, "message": refusal.message, "hint": refusal.fix()}
        self._reply(number, {"error": error})

    def _summarise(self, rows: Any) -> None:
        for row in rows:
            uri = row.denial.target.partition(" ")[0]
            self._terms.log("tool_refused", {**self._about(uri, None), **_named(row)})

    def _about(self, uri: str, argv: list[str] | None) -> dict[str, Any]:
        raw = b"" if argv is None else json.dumps(argv).encode()
        return {
            "agent_id": self._terms.agent_id,
            "uri": text.visible(uri, 512),
            "side_effect_class": "shell",
            "arguments_hash_hex": None if argv is None else hashlib.sha256(raw).hexdigest(),
            "argument_bytes": len(raw),
        }


def _named(row: denials.Row) -> dict[str, Any]:
    return {"denial": row.denial.id, "code": row.denial.code, "grant": row.denial.grant, "count": row.count}


def read(line: bytes) -> tuple[int, str | None, list[str], bytes] | None:
    """Return number, name, arguments and stdin of a message; without a name it is a cancellation, None for neither."""
    try:
        message = strict_json.loads(line, max_bytes=LINE_BYTES)
    except strict_json.MalformedJsonError:
        return None
    if not isinstance(message, dict) or type(message.get("id")) is not int or not 0 <= message["id"] < 2**53:
        return None
    if message.keys() == {"id", "cancel"}:
        return (message["id"], None, [], b"") if message["cancel"] is True else None
    if message.keys() != {"id", "name", "argv", "stdin"}:
        return None
    name, argv, stdin = message["name"], message["argv"], message["stdin"]
    if not isinstance(name, str) or len(name) > 64 or not isinstance(argv, list) or len(argv) > WORDS:
        return None
    if not isinstance(stdin, str) or not all(isinstance(one, str) for one in argv):
        return None
    try:
        "".join((name, *argv)).encode()  # half a pair of surrogates is no text of a program
        return message["id"], name, argv, base64.b64decode(stdin, validate=True)
    except (binascii.Error, ValueError):
        return None
