"""One tree of errors: one class per cause, fields instead of prose, sorted by who must act.

A message is one lower-case line without a full stop, user input in backticks. Advice goes to ``hint``,
the place (``agent.toml:31``) to ``where``. Exit statuses are decided in ``covenant.cli`` alone.
``TABLE`` is the closed set of codes; ``covenant help CODE`` prints the class's docstring.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar


class Actor(StrEnum):
    """Who has to act before the same call can succeed."""

    AUTHOR = "author"
    OPERATOR = "operator"
    MACHINE = "machine"


TABLE: dict[str, type[CovenantError]] = {}


class CovenantError(Exception):
    """Something was refused or failed."""

    code: ClassVar[str] = "error"
    actor: ClassVar[Actor] = Actor.OPERATOR

    def __init__(self, message: str, *, hint: str = "", where: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where
        self.details = details

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            # INVARIANT: a code names one cause; two classes with one code would hide one of them.
            if cls.code in TABLE:
                raise TypeError(f"code {cls.code} is taken by {TABLE[cls.code].__name__}")
            TABLE[cls.code] = cls

    def __str__(self) -> str:
        return f"{self.message} ({self.where})" if self.where else self.message

    def to_json(self) -> dict[str, Any]:
        """The error document of ``--json``: kind and message as version 1, plus code, hint and where."""
        return {
            "kind": "error",
            "message": self.message,
            "code": self.code,
            "hint": self.hint or None,
            "where": self.where or None,
        }


# --- the author of the package must act ---------------------------------------------------------
class AuthorError(CovenantError):
    """The package or its manifest has to be changed."""

    actor = Actor.AUTHOR


class PackageError(AuthorError):
    """The package directory holds something that is refused: a symlink, a device, too much, a bad name."""

    code = "package_invalid"


class ManifestError(AuthorError):
    """The manifest cannot be accepted as it is written."""

    code = "manifest_invalid"

    def to_json(self) -> dict[str, Any]:
        """The error document, with every finding of the manifest in ``errors``, in the order of the file."""
        return {**super().to_json(), "errors": list(self.details.get("errors", ()))}


class ManifestSyntaxError(ManifestError):
    """The manifest is not acceptable TOML: bytes, size, nesting, duplicate keys or grammar."""

    code = "manifest_syntax"


class ToolsError(ManifestError):
    """The tool manifest (tools.json), or what ``tools pin`` recorded of it, cannot be accepted as it is written."""

    code = "tools_invalid"


class UnknownSyscallError(ManifestError):
    """A system call is named that no supported architecture has."""

    code = "unknown_syscall"


class ProgramError(AuthorError):
    """A program of the package, or a granted one, is a script, for another machine, or lacks a library."""

    code = "program_refused"


class GrantedPathError(AuthorError):
    """A granted host path is missing, leads through a symlink, is in other hands, or may never be granted."""

    code = "path_refused"


# --- the operator must act ----------------------------------------------------------------------
class OperatorError(CovenantError):
    """A key, a signature, the trust root, a role or a configuration has to be changed."""


class StoppedError(OperatorError):
    """The command was interrupted by its user or by a signal."""

    code = "interrupted"


class NoRunError(OperatorError):
    """No agent that runs now has this run id, or more than one begins with it."""

    code = "no_such_run"


class UsageError(OperatorError):
    """The command was called in a way that it does not take."""

    code = "usage"


class ConfigError(OperatorError):
    """The configuration file is malformed, or others than root can write it."""

    code = "config_invalid"


class HomeError(OperatorError):
    """COVENANT_HOME or COVENANT_STATE is missing, unsafe or has a wrong mode."""

    code = "home_unsafe"


class KeyFileError(OperatorError):
    """A key file is missing, malformed, of a wrong mode, or its passphrase is wrong."""

    code = "key_file"


class AgentError(OperatorError):
    """The ssh-agent is not there, has no such Ed25519 key, did not sign, or answered with something else."""

    code = "ssh_agent"


class TrustError(OperatorError):
    """The trust root is missing, malformed, expired, or does not allow what was asked."""

    code = "trust_root"


class SignatureError(OperatorError):
    """The envelope does not verify: rule 2."""

    code = "rule_2_signature"


class UnsignedError(SignatureError):
    """The package has no envelope: rule 2."""

    code = "unsigned"


class UnknownKeyError(SignatureError):
    """No signature was made by a key that the trust root lists for this agent."""

    code = "unknown_key"


class RevokedError(SignatureError):
    """The trust root has revoked the key that signed, this signed manifest, or the agent's serials up to this one."""

    code = "revoked"


class ExpiredError(SignatureError):
    """The envelope is not valid at this time."""

    code = "envelope_expired"


class AudienceError(SignatureError):
    """The envelope was signed for another host."""

    code = "wrong_audience"


class DigestMismatchError(SignatureError):
    """A file of the package is not the file that was signed."""

    code = "digest_mismatch"


class SerialError(SignatureError):
    """The serial is older than one already accepted, reused for other bytes, or too far ahead."""

    code = "serial_rollback"


# --- the nine rules that are not covered above (rule 2 is SignatureError and below) ---------------
class RuleViolation(OperatorError):
    """One of the nine validation rules refused the manifest (seeds/octantos-capability-manifests.txt)."""

    rule: ClassVar[int] = 0

    def __init__(self, message: str, *, grant: str = "", hint: str = "", where: str = "", **details: Any) -> None:
        super().__init__(message, hint=hint, where=where, **details)
        self.grant = grant


class SchemaViolation(RuleViolation):
    """Rule 1: a structural constraint across sections is broken."""

    code = "rule_1_schema"
    rule = 1


class NeverGrantableError(SchemaViolation):
    """Rule 1: a path that no manifest is granted, whoever signed it (policy/data/never_grantable.toml)."""

    code = "never_grantable"


class RoleViolation(RuleViolation):
    """Rule 3: the grants are not within the role's ceiling."""

    code = "rule_3_role"
    rule = 3


class ParentViolation(RuleViolation):
    """Rule 4: the grants are not within the parent's effective grants."""

    code = "rule_4_parent"
    rule = 4

    def to_json(self) -> dict[str, Any]:
        """The error document, with what was requested, granted and removed in ``domains``; empty for other causes."""
        return {**super().to_json(), "domains": dict(self.details.get("domains", {}))}


class SpawnBudgetViolation(RuleViolation):
    """Rule 5: the spawn depth or the number of live descendants would exceed its limit."""

    code = "rule_5_spawn_budget"
    rule = 5


class ResourceViolation(RuleViolation):
    """Rule 6: the host has less than the manifest asks for."""

    code = "rule_6_resources"
    rule = 6


class DenyListViolation(RuleViolation):
    """Rule 7: a permanently denied system call stands in the allow set."""

    code = "rule_7_deny_list"
    rule = 7


class IdentityViolation(RuleViolation):
    """Rule 8: the agent id already belongs to another package."""

    code = "rule_8_identity"
    rule = 8


class LifetimeViolation(RuleViolation):
    """Rule 9: an unlimited lifetime without an explicit operator approval."""

    code = "rule_9_lifetime"
    rule = 9


# --- the machine must act -------------------------------------------------------------------------
class MachineError(CovenantError):
    """This host lacks something, or the kernel answered in a way that was not expected."""

    actor = Actor.MACHINE


class InternalError(MachineError):
    """A fault of this program, or of the machine under it (a full disk). The lines on stderr tell where."""

    code = "internal"


class PrivilegeError(MachineError):
    """The call needs root."""

    code = "needs_root"


class HostError(MachineError):
    """A tool or kernel feature is missing or broken."""

    code = "host_unable"


class InstallationError(MachineError):
    """A data file of this program is missing or malformed: the installation is damaged."""

    code = "installation_damaged"


class NotElfError(HostError):
    """A file that should be an ELF program or library is something else, or is damaged."""

    code = "not_elf"


class MissingLibraryError(NotElfError):
    """A program needs a shared library that is neither in the package nor in the distribution's directories."""

    code = "missing_library"


class StaleClosureError(HostError):
    """A file of the host changed between the listing of its closure and its copy; another attempt lists it anew."""

    code = "closure_stale"


class NotEnforceableError(MachineError):
    """The manifest demands something that this host cannot enforce."""

    code = "not_enforceable"


class NotYetEnforceableError(MachineError):
    """The manifest demands something whose enforcement is not built yet."""

    code = "not_yet_enforceable"


class BackendError(OperatorError):
    """The chosen backend may not run this package."""

    code = "backend_refused"


class SelfTestError(MachineError):
    """In a throw-away sandbox under the agent's own policy something that it forbids was not refused, or could not be
    tried. Nothing of the agent was started."""

    code = "self_test_failed"


class LossError(OperatorError):
    """The target of a compilation would allow more than the manifest, and the loss was not accepted by its id."""

    code = "restriction_lost"

    def to_json(self) -> dict[str, Any]:
        """The error document, with every loss of this manifest on the target in ``losses``."""
        return {**super().to_json(), "losses": list(self.details.get("losses", ()))}


class LedgerError(MachineError):
    """The audit log cannot be written or does not hold together."""

    code = "ledger"


class EventError(MachineError):
    """An audit event does not have the fields of its kind: a programming error, nothing was written."""

    code = "event_invalid"


class StateError(MachineError):
    """COVENANT_STATE holds a file that is damaged, or is busy, or cannot be written."""

    code = "state_damaged"


class ArtefactError(MachineError):
    """A compiled artefact cannot be read back, so that nothing can be said about what it allows."""

    code = "artefact_unreadable"


class ProofError(MachineError):
    """The artefacts allow more or less than the effective grants: read back, they are not what was decided."""

    code = "proof_failed"


class UnexplainedError(MachineError):
    """The artefacts and their provenance disagree: an emitted rule has no cause, or a cause no rule."""

    code = "unexplained_rule"


class KernelError(MachineError):
    """A system call or tool failed where it should not."""

    code = "kernel"


# --- a run that was started and failed ------------------------------------------------------------
class RunError(CovenantError):
    """The agent was started and did not deliver a result."""

    actor = Actor.AUTHOR


class MalformedOutputError(RunError):
    """The agent's output is not one JSON line of the runtime contract."""

    code = "malformed_output"


class OutputTooLargeError(RunError):
    """The agent wrote more than the contract allows."""

    code = "output_too_large"


class EarlyOutputError(RunError):
    """The agent wrote to stdout before it was given its intent."""

    code = "early_output"


class AgentFailedError(RunError):
    """The agent exited with a status other than 0 or was killed by a signal of its own."""

    code = "agent_failed"


class OutOfMemoryError(RunError):
    """The agent's cgroup ran out of memory and the kernel killed it."""

    code = "out_of_memory"


class DeadlineError(RunError):
    """The agent was still running at its effective deadline."""

    code = "deadline"


class CpuTimeError(RunError):
    """The agent used more processor time than cpu_time_ms; ``details['clock']`` names the clock that it used up."""

    code = "cpu_time"


class StartTimeoutError(RunError):
    """The sandbox did not start its first process in time."""

    code = "start_timeout"
    actor = Actor.MACHINE


class CutOffError(RunError):
    """The supervisor died while the agent ran: the next start ended what was left of it and wrote this down."""

    code = "cut_off"
    actor = Actor.MACHINE


class GateError(RunError):
    """A gate of the run's network ended or misbehaved: the network stayed closed, and the run was ended."""

    code = "gate_died"
    actor = Actor.MACHINE


class DriftError(RunError):
    """Something that confines the agent was changed while it ran: it was ended. ``details['layer']`` says what."""

    code = "drift"
    actor = Actor.MACHINE


class SandboxCrashedError(RunError):
    """The sandbox ended without the agent having exited."""

    code = "sandbox_crashed"
