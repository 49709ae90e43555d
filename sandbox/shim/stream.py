"""Relay the streams of a session between an agent and its caller (contract `stdio`).

No descriptor of the caller enters a sandbox: the shim moves the bytes between the caller's pipes and the agent's.
"""

from __future__ import annotations

from collections.abc import Collection

from sandbox.run_io import CallerStreams, StreamTotals
from sandbox.shim import relay
from sandbox.shim.agent_loop import AgentLoop
from sandbox.shim.relay import ByteCount, Relay


class StreamSession:
    """Relay the streams of one session (agent_loop.AgentSession).

    The relays begin with the agent. The end of file of the caller's stdin closes the agent's. The exit of the agent
    ends the session, once the rest of its output is in the caller's pipes.
    """

    silent = False
    answer = b""

    def __init__(self, caller: CallerStreams) -> None:
        self._caller = caller
        self._in, self._out = ByteCount(), ByteCount()

    @property
    def totals(self) -> StreamTotals:
        """Return what was moved so far."""
        return StreamTotals(self._in.total, self._in.sha256, self._out.total, self._out.sha256)

    def attach(self, loop: AgentLoop) -> None:
        """Prepare the relays. Nothing is read before the agent runs."""
        caller, channel = self._caller, loop.channel
        self._loop = loop
        self._input = Relay(caller.stdin, channel.stdin, seen=self._in.feed)
        self._output = Relay(channel.stdout, caller.stdout, seen=self._saw_output)
        self._errors = Relay(channel.stderr, caller.stderr, seen=loop.keep_stderr)
        self._begun = False

    def begin(self, intent: bytes) -> None:
        """Start the relays; a session has no intent."""
        self._begun = True
        self._loop.forget(self._loop.channel.stderr)
        for one in (self._input, self._output, self._errors):
            one.start(self._loop)

    def read_early(self) -> None:
        """Do nothing: an agent may write at once, and its output stays in the pipe until ``begin``."""

    def stop_input(self) -> None:
        """Relay no more input."""
        if self._begun:
            self._input.stop()

    def drained(self) -> Collection[int]:
        """Return the descriptors of the output that is still to be relayed."""
        self.stop_input()
        if not self._begun:
            return (self._loop.channel.stderr,)
        for fd in (self._caller.stdout, self._caller.stderr):
            relay.make_room(fd)
        return (*self._output.fds, *self._errors.fds)

    def _saw_output(self, data: bytes) -> None:
        self._loop.spoke()
        self._out.feed(data)
