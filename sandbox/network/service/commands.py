"""Commands of a run at the service gate: one request of a stub, and the status and output of the program.

    POST /command/NAME    body: a line of arguments, each `.` and its base64; a line with the base64 of stdin
    answer                three lines: exit status, base64 of stdout, base64 of stderr

The gate reads the frame and passes the call on to the run's shim, which decides. A refused call has an answer as well:
status 126, and the reason on stderr, so that a stub does the same with every answer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeAlias

from aiohttp import web

from sandbox.network.gate.call_line import CallLine, Frames
from sandbox.network.service.shapes import RefusedError

_PATH: Final = re.compile(r"/command/([a-z0-9][a-z0-9._+-]{0,31})")
CONTENT: Final = "application/x-covenant-command"
# A call with its stdin, and its answer, as lines of JSON between gate and shim.
REQUEST_BYTES: Final = 6 << 20
ARGUMENTS: Final = 256
REFUSED: Final = 126


class CommandCall(NamedTuple):
    """A call of a command: its name, its arguments and its stdin."""

    name: str
    argv: list[str]
    stdin: bytes


CommandLine: TypeAlias = CallLine[CommandCall, dict[str, Any]]


def command_line(fd: int) -> CommandLine:
    """Return the line of ``fd`` to the shim, which has lines of JSON."""
    return CallLine(fd, Frames(_call, _cancel, _answer), most_bytes=2 * REQUEST_BYTES)


def _call(number: int, call: CommandCall) -> bytes:
    stdin = base64.b64encode(call.stdin).decode()
    return _json_line({"id": number, "name": call.name, "argv": call.argv, "stdin": stdin})


def _cancel(number: int) -> bytes:
    return _json_line({"id": number, "cancel": True})


def _json_line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    if not (line := await reader.readline()):
        raise EOFError
    message = json.loads(line)
    return message["id"], message


class CommandEndpoint:
    """Answers calls of one agent to ``http://tools.covenant/command/NAME``."""

    def __init__(self, line: CommandLine, body: Callable[[web.BaseRequest], Awaitable[bytes]]) -> None:
        self._line, self._body = line, body

    @staticmethod
    def named(path: str) -> bool:
        """Whether a path is that of a command."""
        return path.startswith("/command/")

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one call, whose frame was looked at.

        Raises:
            RefusedError: it is no call of a stub.
        """
        found = _PATH.fullmatch(request.raw_path)
        if found is None:
            raise RefusedError(404, "path_refused", "commands are at /command/NAME")
        # A page in a browser of the agent cannot send this type without asking first.
        if request.method != "POST" or request.content_type != CONTENT or "Origin" in request.headers:
            raise RefusedError(405, "frame_refused", f"a call is a POST of {CONTENT}")
        argv, stdin = read(await self._body(request))
        answer = await self._line.ask(CommandCall(found[1], argv, stdin))
        if "ok" in answer:
            said = answer["ok"]
            return _answered(said["status"], said["stdout"], said["stderr"])
        error = answer["error"]
        said = f"covenant: {error['message']} [{error['code']}]\n"
        said += f"  fix: {error['hint']}\n" if error.get("hint") else ""
        return _answered(REFUSED, "", base64.b64encode(said.encode("utf-8", "backslashreplace")).decode())


def read(body: bytes) -> tuple[list[str], bytes]:
    """Return the arguments and the stdin of a call's body.

    Raises:
        RefusedError: it is not of that form.
    """
    try:
        words, stdin, rest = body.decode("ascii").split("\n")
        if rest or len(body) > REQUEST_BYTES or words.count(" ") >= ARGUMENTS:
            raise ValueError
        argv = [base64.b64decode(_dotted(one), validate=True).decode() for one in words.split()]
        return argv, base64.b64decode(stdin, validate=True)
    except (ValueError, binascii.Error) as e:
        raise RefusedError(400, "malformed", "a call is a line of arguments and a line of stdin, in base64") from e


def _dotted(word: str) -> str:
    if not word.startswith("."):
        raise ValueError(word)
    return word[1:]


def _answered(status: int, stdout: str, stderr: str) -> web.Response:
    return web.Response(body=f"{status}\n{stdout}\n{stderr}\n".encode("ascii"), content_type=CONTENT)
