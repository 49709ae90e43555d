"""How a run that was started failed."""

from __future__ import annotations

from policy.errors.base import Actor, CovenantError
from policy.errors.signatures import RevokedError


class RunError(CovenantError):
    """The agent was started and did not deliver a result."""

    actor = Actor.AUTHOR


class MalformedOutputError(RunError):
    """The agent's output is not what its contract says: one JSON line, or text."""

    code = "malformed_output"


class OutputTooLargeError(RunError):
    """The agent wrote more than the contract allows."""

    code = "output_too_large"


class EarlyOutputError(RunError):
    """The agent wrote to stdout before it got its intent."""

    code = "early_output"


class AgentFailedError(RunError):
    """The agent exited with a status other than 0 or by a signal."""

    code = "agent_failed"


class OutOfMemoryError(RunError):
    """The agent's cgroup ran out of memory and the kernel killed it."""

    code = "out_of_memory"


class DeadlineError(RunError):
    """The agent was still running at its effective deadline."""

    code = "deadline"


class CpuTimeError(RunError):
    """The agent used more CPU time than cpu_time_ms; ``details['clock']`` names the clock."""

    code = "cpu_time"


class ParentEndedError(RunError):
    """The parent's run ended, and on_parent_exit does not let this one continue."""

    code = "parent_ended"


class StartTimeoutError(RunError):
    """The sandbox did not start its first process in time."""

    code = "start_timeout"
    actor = Actor.MACHINE


class KilledError(RunError):
    """The run was ended by an authorised requester. The log holds its name and its reason."""

    code = "stopped"
    actor = Actor.OPERATOR


class SupersededError(KilledError):
    """A newer serial of its agent id, or of that of a run above it, was accepted: on_newer_serial is `end`."""

    code = "superseded"


class StoppedError(RunError):
    """The command was interrupted by its user or by a signal."""

    code = "interrupted"
    actor = Actor.OPERATOR


class CutOffError(RunError):
    """The supervisor died while the agent ran; the next start ended the rest and logged this."""

    code = "cut_off"
    actor = Actor.MACHINE


class GateError(RunError):
    """A gate of the run's network ended or misbehaved: the network stayed closed, and the run was ended."""

    code = "gate_died"
    actor = Actor.MACHINE


class DriftError(RunError):
    """The agent's confinement changed during the run, so the run was ended. ``details['layer']`` names the layer."""

    code = "drift"
    actor = Actor.MACHINE


class SandboxCrashedError(RunError):
    """The sandbox ended before the agent exited."""

    code = "sandbox_crashed"


class RunRevokedError(RunError, RevokedError):
    """A run that was ended because what it rests on was revoked; its code is that of the refusal, ``revoked``."""

    actor = Actor.OPERATOR


class ToolDeniedError(CovenantError):
    """A call of a tool is not what the manifest allows; ``details`` name the denial and the lines that end it."""

    code = "tool_denied"
    actor = Actor.AUTHOR


class ToolServerError(RunError):
    """A tool server in its sandbox did not start, did not answer, or does not speak MCP."""

    code = "tool_server"
