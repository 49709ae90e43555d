"""How a cell is run: `covenant exec` with the agent's layers, with pipes, in a terminal, or as an ACP server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tests.agents import catalogue, place
from tests.kernel import serving

SECONDS = 300.0
BESIDE = "/opt/fake/beside"


def command(agent: str, words: Sequence[str], *options: str, kind: str = "") -> list[str]:
    """Return `covenant exec` with the layers of an agent, and of a cell's adapter."""
    layers = [word for name in place.layers(agent, kind) for word in ("--layer", name)]
    none = () if "--workspace" in options else ("--no-workspace",)
    return serving.covenant_command("exec", *layers, *none, *options, "--", *words)


def version(agent: str) -> list[str]:
    """Return `covenant exec` of the cell `version`: the agent's program alone."""
    found = catalogue.load()[agent]
    env = [word for pair in found.env.items() for word in ("--env", "=".join(pair))]
    return command(agent, found.words("version"), "--no-tty", *env)


def beside(agent: str, kind: str, cell: str, *options: str) -> list[str]:
    """Return `covenant exec` of a cell whose agent has a checkout, and a model beside it."""
    found = catalogue.load()[agent]
    tried = found.cell(cell)
    assert tried is not None
    variables = {**found.variables(cell), **({"PIPE": tried.pipe} if tried.pipe else {})}
    env = [word for pair in variables.items() for word in ("--env", "=".join(pair))]
    words = ["sh", BESIDE, kind, *found.words(cell)]
    return command(agent, words, "--profile", found.profile, *env, *options, kind=cell)


def environment() -> dict[str, str]:
    """Return the environment of `covenant exec`: the store of the agents, and no supervisor."""
    return {"PATH": "/usr/bin:/bin", "COVENANT_HOME": str(place.home()), "TERM": "xterm-256color", "LANG": "C.UTF-8"}


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run to the end, with pipes."""
    return subprocess.run(
        words,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )


class Screen:
    """A terminal of tmux, 90 columns by 30 rows, with one command in it."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self._socket = folder / "tmux"
        line = f"exec {shlex.join(words)}"
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-x", "90", "-y", "30", line, ";", "set", "remain-on-exit", "on"
        )

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *words], env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def shown(self) -> str:
        """Return the text of the screen."""
        return self._tmux("capture-pane", "-p", "-J")

    def until(self, pattern: str) -> str:
        """Wait until the screen matches, or with a leading `!` no longer matches, and return it."""
        end = time.monotonic() + SECONDS
        while True:
            found = self.shown()
            if bool(re.search(pattern.removeprefix("!"), found)) != pattern.startswith("!"):
                return found
            assert time.monotonic() < end, f"never shown: {pattern}\n{found}"
            time.sleep(0.1)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def key(self, key: str) -> None:
        """Type a key by its tmux name, or text."""
        self._tmux("send-keys", key)

    def close(self) -> None:
        """End the terminal, and what is in it."""
        with contextlib.suppress(AssertionError):
            self._tmux("kill-server")


@contextlib.contextmanager
def screen(folder: Path, words: list[str]) -> Iterator[Screen]:
    """A terminal with this command, ended with the block."""
    found = Screen(folder, words)
    try:
        yield found
    finally:
        found.close()


class RefusedError(Exception):
    """Raised when an agent answers a request with an error."""


class Client:
    """The least of an ACP client: requests over a command's pipes; what the agent asks for is allowed."""

    def __init__(self, words: list[str], errors: IO[bytes]) -> None:
        self.process = subprocess.Popen(
            words, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        self._number = 0
        self._read = b""
        self.updates: list[dict[str, Any]] = []

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a request, and return the result. Requests of the agent are answered meanwhile.

        Raises:
            RefusedError: Raised when the agent answers with an error.
        """
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message:
                self._answer(message)
            elif message.get("id") == self._number:
                if "error" in message:
                    raise RefusedError(str(message["error"]))
                result: dict[str, Any] = message["result"] or {}
                return result

    def _answer(self, message: dict[str, Any]) -> None:
        if "id" not in message:
            self.updates.append(message)
        elif message["method"] == "session/request_permission":
            options = message["params"]["options"]
            allowed = next(one for one in options if one["kind"].startswith("allow"))
            outcome = {"outcome": "selected", "optionId": allowed["optionId"]}
            self._send({"id": message["id"], "result": {"outcome": outcome}})
        else:
            self._send({"id": message["id"], "error": {"code": -32601, "message": "not offered"}})

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        end = time.monotonic() + SECONDS
        while True:
            line, newline, rest = self._read.partition(b"\n")
            if newline:
                self._read = rest
                with contextlib.suppress(ValueError):
                    found: dict[str, Any] = json.loads(line)
                    return found
                continue
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no answer; so far: {self._read!r}"
            more = os.read(self.process.stdout.fileno(), 65536)
            assert more, f"the agent ended: {self._read!r}"
            self._read += more

    def close(self) -> None:
        """Close the agent's stdin, and end it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
