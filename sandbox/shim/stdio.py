"""Give an agent its intent on stdin, and keep what it writes to stdout as its answer (contracts `line` and `text`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from policy import contract, errors
from sandbox.kernel.proc import pipes
from sandbox.run_io import StreamTotals
from sandbox.shim.agent_loop import AgentLoop


class StdioSession:
    """Exchange one intent and one answer with an agent over pipes (agent_loop.AgentSession)."""

    totals: StreamTotals | None = None

    def __init__(self, spoken: contract.Answering = contract.LINE) -> None:
        self._contract = spoken
        self._stdout = bytearray()
        self._pending = memoryview(b"")

    @property
    def silent(self) -> bool:
        """Whether the agent must write nothing to stdout before it has its intent."""
        return self._contract.silent

    @property
    def answer(self) -> bytes:
        """Return stdout."""
        return bytes(self._stdout)

    def attach(self, loop: AgentLoop) -> None:
        """Listen to stdout. The output of an agent that may write at once stays in the pipe until ``begin``."""
        self._loop, self._channel = loop, loop.channel
        if self.silent:
            loop.listen(self._channel.stdout, self._read)

    def begin(self, intent: bytes) -> None:
        """Write the intent."""
        if not self.silent:
            self._loop.listen(self._channel.stdout, self._read)
        self._pending = memoryview(intent)
        # Most intents are taken whole, and then there is nothing to wait for.
        if not self._written():
            self._loop.listen(self._channel.stdin, self._write, writable=True)

    def read_early(self) -> None:
        """End the run if stdout has something before the intent."""
        self._read()

    def stop_input(self) -> None:
        """Write no more of the intent."""
        self._loop.forget(self._channel.stdin)

    def drained(self) -> Collection[int]:
        """Return the descriptor of stdout: the rest of it is still to be read."""
        self.stop_input()
        return (self._channel.stdout,)

    def _write(self) -> None:
        if self._written():
            self.stop_input()

    def _written(self) -> bool:
        """Whether the agent has its intent, as far as it takes it."""
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._channel.stdin, self._pending) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass
        # One intent and no more: the end of file tells an agent that reads to the end that it has everything.
        with contextlib.suppress(OSError):
            pipes.shut(self._channel.stdin)
        return True

    def _read(self) -> None:
        data = pipes.read(self._channel.stdout)
        if data is None:
            return
        if not data:
            self._loop.forget(self._channel.stdout)
            return
        loop = self._loop
        self._stdout += data
        loop.spoke()
        most = min(loop.limits.stdout_bytes, self._contract.stdout_bytes)
        if loop.started_at is None:
            loop.end(errors.EarlyOutputError("stdout was written before the intent was given"), gently=False)
        elif len(self._stdout) > most:
            loop.forget(self._channel.stdout)
            loop.end(errors.OutputTooLargeError(f"stdout is over {most} bytes"), gently=False)
