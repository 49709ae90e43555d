"""Errors of the daemon, and of its clients at its socket."""

from __future__ import annotations

from policy.errors.base import Actor
from policy.errors.machine import MachineError, StoreError
from policy.errors.operator import OperatorError
from policy.errors.runs import RunError


class MalformedRequestError(OperatorError):
    """The request is not one JSON object with the fields of its kind, or is nested too deeply."""

    code = "malformed_request"


class UnknownKindError(MalformedRequestError):
    """The request has a kind that this daemon does not know."""

    code = "unknown_kind"


class UnsupportedError(OperatorError):
    """A kind of Covenant version 1 that this daemon does not serve."""

    code = "unsupported"


class FrameError(OperatorError):
    """The received bytes are no frame: longer than 8 MiB, or incomplete."""

    code = "bad_frame"


class AuthenticationError(OperatorError):
    """The client gave no valid token."""

    code = "authentication_failed"


class AnswerTooLargeError(OperatorError):
    """The answer would not fit one frame of 8 MiB; ask for fewer rows."""

    code = "answer_too_large"


class DaemonSilentError(MachineError):
    """No daemon listens at the socket, it ended before it answered, or the listener is no daemon."""

    code = "daemon_silent"
    actor = Actor.OPERATOR


class DaemonRunsError(OperatorError):
    """Another daemon serves this home."""

    code = "daemon_runs"


class RootRefusedError(OperatorError):
    """The daemon needs no rights and does not run as root without `--allow-root`."""

    code = "root_refused"


class SettingError(OperatorError):
    """An environment variable or file that configures the daemon has a value that cannot be used."""

    code = "setting_invalid"


class NoSupervisorError(MachineError):
    """No supervisor listens, or not for this user: the daemon itself runs no agent."""

    code = "no_supervisor"
    actor = Actor.OPERATOR


class NoAgentError(OperatorError):
    """No agent of this daemon has that id, or its package cannot be used."""

    code = "no_such_agent"


class NoAgentMatchedError(OperatorError):
    """The intent shares no word with any agent, so no agent ran. The command ends with status 3."""

    code = "no_agent_matched"


class AgentIdTakenError(OperatorError):
    """Two packages have the same agent id: neither is run until one is gone."""

    code = "agent_id_taken"


class StaleAgentError(OperatorError):
    """The package changed since the daemon read it."""

    code = "agent_changed"


class HermesError(MachineError):
    """The Hermes API did not answer, gave an invalid answer, or lacks a needed function."""

    code = "hermes_failed"


class HermesUnconfiguredError(OperatorError):
    """The agent's runtime is hermes, and no Hermes API is configured."""

    code = "hermes_unconfigured"


class RemoteRunError(RunError):
    """The run ended at the Hermes API without an answer."""

    code = "remote_run_failed"


class ToolRefusedError(RunError):
    """The run used a tool that is not in `hermes.tools_allowed`: it was stopped."""

    code = "tool_not_allowed"


class NoApprovalError(OperatorError):
    """No run waits for this approval: it was answered, it expired, or its run has ended."""

    code = "no_such_approval"


class LeaseError(OperatorError):
    """A lease is for another run, policy or target than the request that waits, or was given before."""

    code = "lease_refused"


class PreemptedError(RunError):
    """The agent's budget was used up during its run, so the run was ended."""

    code = "budget_preempted"
    actor = Actor.OPERATOR


class BudgetUnseededError(OperatorError):
    """No capacity was set for the agent, so it has no bucket and is charged nothing."""

    code = "budget_unseeded"


class BudgetExhaustedError(OperatorError):
    """The agent has fewer credits than the intent needs; `hint` says when it will have enough."""

    code = "budget_exhausted"


class ReservationError(OperatorError):
    """No reservation with that receipt is open: it was settled, given back, or never made."""

    code = "budget_reservation"


class CheckpointError(OperatorError):
    """The checkpoint cannot be kept: another is active for its intent and agent, or it names a path of this machine."""

    code = "budget_checkpoint"


class NoCheckpointError(OperatorError):
    """No intent of that id waits to be resumed, or not for this caller; each checkpoint is used once."""

    code = "no_checkpoint"


class ReceiptError(OperatorError):
    """The receipt or batch contradicts an existing one, or does not exist."""

    code = "receipt_conflict"


class NothingToSettleError(OperatorError):
    """Every receipt is in a batch already."""

    code = "nothing_to_settle"


class ChainError(OperatorError):
    """The chain refused the transaction, or recorded another one than was sent."""

    code = "chain_failed"


class SettlementMissingError(OperatorError):
    """The packages of the extra `settlement` are not installed."""

    code = "settlement_missing"


class ScreensMissingError(OperatorError):
    """The packages of the extra `tui` are not installed."""

    code = "screens_missing"


class NoMemoryError(OperatorError):
    """No record of memory that the caller may see has this id."""

    code = "no_such_memory"


class MemoryInvalidError(OperatorError):
    """Memory does not accept the record, order or policy."""

    code = "memory_invalid"


class MemoryFullError(OperatorError):
    """The caller has the maximum of records, or of bytes in them."""

    code = "memory_full"


class MemoryConflictError(OperatorError):
    """The record differs from what the order expects."""

    code = "memory_conflict"


class MemoryStoreError(StoreError):
    """The memory database cannot be opened, read or written, or a newer daemon made it."""

    code = "memory_store"


class TextIgnoredError(OperatorError):
    """The text matches a rule of .covenantignore, so it is not kept."""

    code = "text_ignored"


class IgnoreFileError(OperatorError):
    """The rules of .covenantignore cannot be read."""

    code = "ignore_file"


class EmbedderError(MachineError):
    """The embedder is not installed, did not answer in time, or its answer is no vector."""

    code = "embedder"


class HttpRefusedError(OperatorError):
    """The HTTP request is refused before its token is checked: its host, origin, type, size or form."""

    code = "http_refused"


class SlowSubscriberError(OperatorError):
    """The reader of a stream was so slow that its queue was full. The store holds the missed entries."""

    code = "slow_subscriber"


class TooManySubscribersError(OperatorError):
    """The maximum of streams is open."""

    code = "too_many_streams"


class SenderMismatchError(OperatorError):
    """The task names another sender than its caller."""

    code = "a2a_sender_mismatch"


class RecipientRejectedError(OperatorError):
    """The recipient has not granted tasks in the sender's name, or is not known here."""

    code = "a2a_recipient_rejected"


class NoTaskError(OperatorError):
    """The mailbox holds no such task, or the caller is neither its sender nor its recipient."""

    code = "no_such_task"


class TaskStateError(OperatorError):
    """The task's state does not allow the operation: it is not leased, or has its result already."""

    code = "task_state"


class LeaseMismatchError(OperatorError):
    """The task is leased under another lease than the one that was named."""

    code = "lease_mismatch"


class TaskExistsError(OperatorError):
    """Another task of the same sender has the same id."""

    code = "task_exists"


class TaskInvalidError(OperatorError):
    """The mailbox does not accept the task, its result or the operation."""

    code = "task_invalid"


class MailboxFullError(OperatorError):
    """The maximum of tasks waits for this recipient, or in all."""

    code = "mailbox_full"


class NoToolError(OperatorError):
    """No tool of that name is registered."""

    code = "no_such_tool"


class ToolArgumentsError(OperatorError):
    """The arguments do not fit the tool's schema; `where` names the place."""

    code = "tool_arguments"


class ToolError(MachineError):
    """The tool gave no answer, or none in time."""

    code = "tool_failed"


class NoteError(OperatorError):
    """A signed note, checkpoint or cosignature is malformed, or a signature of a known key does not verify."""

    code = "note_invalid"


class CapabilityMissingError(OperatorError):
    """The caller holds no live grant of an action that this needs."""

    code = "capability_not_held"


class CapabilityScopeError(OperatorError):
    """The caller holds a grant of the action, but its scope does not admit the request."""

    code = "capability_scope"


class CapabilityExhaustedError(OperatorError):
    """The grant was used as often as it may be (`max_uses`)."""

    code = "capability_exhausted"


class CapabilityInvalidError(OperatorError):
    """A capability token does not verify: its form, its signature, its end, or the chain of grants above it."""

    code = "capability_invalid"


class GrantRefusedError(OperatorError):
    """The grant cannot be made: its scope is malformed, or it would allow more than its giver holds."""

    code = "grant_refused"


class NotYoursError(OperatorError):
    """Only the holder or giver of the grant, or the operator, may revoke it."""

    code = "grant_not_yours"


class OperatorOnlyError(OperatorError):
    """Only the operator may ask for this."""

    code = "operator_only"


class PeerRefusedError(OperatorError):
    """The peer cannot be enrolled, or the prefix names no single peer."""

    code = "peer_refused"


class OperatorTokenError(OperatorError):
    """The operator's token file is a symlink, is not ours, or can be read by others."""

    code = "operator_token_unsafe"


class AttestationError(OperatorError):
    """The message to attest is too long, is not base58, or its time is not now."""

    code = "attestation_refused"


class SecretDeniedError(OperatorError):
    """There is no such secret, or the caller holds no grant that names it; the answer does not say which."""

    code = "secret_denied"


class NotSenderError(OperatorError):
    """Only the sender of a task may withdraw it."""

    code = "not_the_sender"
