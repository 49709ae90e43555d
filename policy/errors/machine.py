"""Errors that the administrator of the machine must act on."""

from __future__ import annotations

from policy.errors.base import Actor, CovenantError


class MachineError(CovenantError):
    """This host lacks something, or the kernel answered in a way that was not expected."""

    actor = Actor.MACHINE


class InternalError(MachineError):
    """A fault of this program. The lines on stderr show the place."""

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


class SelfTestError(MachineError):
    """In a throw-away sandbox under the agent's own policy something that it forbids was not refused, or could not be
    tried. Nothing of the agent was started."""

    code = "self_test_failed"


class LedgerError(MachineError):
    """The audit log cannot be written or does not verify."""

    code = "ledger"


class ExportTimeoutError(MachineError):
    """`covenant export --once` gave up: for the time of --timeout a target took nothing. What it acknowledged is noted,
    and the other rows are still in the log: the same command goes on with them."""

    code = "export_timeout"


class StoreError(MachineError):
    """A file of the daemon's state cannot be read or written; acknowledged data is safe."""

    code = "store"


class StoreFullError(StoreError):
    """The disk is full. Nothing of the request was written; other data is unchanged."""

    code = "store_full"


class StdoutError(MachineError):
    """stdout cannot be written: it is closed, or its target is full. The result could not be shown there."""

    code = "stdout_failed"


class EventError(MachineError):
    """An audit event does not have the fields of its kind: a programming error, nothing was written."""

    code = "event_invalid"


class StateError(MachineError):
    """COVENANT_STATE contains a damaged file, is busy, or cannot be written."""

    code = "state_damaged"


class ArtefactError(MachineError):
    """A compiled artefact cannot be read back, so its grants are unknown."""

    code = "artefact_unreadable"


class ProofError(MachineError):
    """The artefacts, read back, allow more or less than the effective grants."""

    code = "proof_failed"


class UnexplainedError(MachineError):
    """The artefacts and their provenance disagree: an emitted rule has no cause, or a cause no rule."""

    code = "unexplained_rule"


class KeeperError(MachineError):
    """The shim of a run does not answer: it hangs, or the machine is too busy."""

    code = "keeper_silent"


class KernelError(MachineError):
    """A system call or tool failed where it should not."""

    code = "kernel"
