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
    """The received bytes are no frame: longer than 8 MiB, or cut off."""

    code = "bad_frame"


class AuthenticationError(OperatorError):
    """The client gave no valid token."""

    code = "authentication_failed"


class AnswerTooLargeError(OperatorError):
    """The answer would not fit one frame of 8 MiB; ask for fewer rows."""

    code = "answer_too_large"


class DaemonSilentError(MachineError):
    """No daemon listens at the socket, it ended before it answered, or does not speak as one."""

    code = "daemon_silent"
    actor = Actor.OPERATOR


class DaemonRunsError(OperatorError):
    """Another daemon serves this home."""

    code = "daemon_runs"


class RootRefusedError(OperatorError):
    """The daemon needs no rights and does not run as root unless it is told to (`--allow-root`)."""

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
    """No word of the intent is one of an agent's, so no agent was asked. The command ends with status 3."""

    code = "no_agent_matched"


class AgentIdTakenError(OperatorError):
    """Two packages have the same agent id: neither is run until one is gone."""

    code = "agent_id_taken"


class StaleAgentError(OperatorError):
    """The package was changed since the daemon looked at it."""

    code = "agent_changed"


class HermesError(MachineError):
    """The Hermes API did not answer, answered nonsense, or lacks what a run needs."""

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
    """No run waits for such an approval: it was answered, its time is over, or its run has ended."""

    code = "no_such_approval"


class LeaseError(OperatorError):
    """A lease is for another run, policy or target than the request that waits, or was given before."""

    code = "lease_refused"


class PreemptedError(RunError):
    """The agent's budget was used up while it ran: it was ended."""

    code = "budget_preempted"
    actor = Actor.OPERATOR


class BudgetUnseededError(OperatorError):
    """No capacity was set for the agent: it has no bucket, and nothing is taken from it."""

    code = "budget_unseeded"


class BudgetExhaustedError(OperatorError):
    """The agent's bucket does not hold what the intent needs; `hint` says when it will."""

    code = "budget_exhausted"


class ReservationError(OperatorError):
    """No reservation with that receipt is open: it was settled or given back already, or never made."""

    code = "budget_reservation"


class CheckpointError(OperatorError):
    """The checkpoint cannot be kept: another is active for its intent and agent, or it names a path of this machine."""

    code = "budget_checkpoint"


class NoCheckpointError(OperatorError):
    """No intent of that id waits to be resumed, or not for this caller; each checkpoint is used once."""

    code = "no_checkpoint"


class ReceiptError(OperatorError):
    """The receipt or batch contradicts one that is there, or is not there."""

    code = "receipt_conflict"


class NothingToSettleError(OperatorError):
    """Every receipt is in a batch already."""

    code = "nothing_to_settle"


class ChainError(OperatorError):
    """The chain did not take the transaction, or what it took is not what was sent."""

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
    """The record, order or policy is one that memory does not take."""

    code = "memory_invalid"


class MemoryFullError(OperatorError):
    """The caller has as many records, or as much in them, as one caller may have."""

    code = "memory_full"


class MemoryConflictError(OperatorError):
    """The record is not as the order expects it."""

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
    """The embedder is not installed, did not answer in time, or answered with something that is no vector."""

    code = "embedder"


class HttpRefusedError(OperatorError):
    """The request over HTTP is refused before it is asked whose it is: its host, origin, type, size or form."""

    code = "http_refused"


class SlowSubscriberError(OperatorError):
    """The reader of a stream was so slow that its queue was full. The store holds the missed entries."""

    code = "slow_subscriber"


class TooManySubscribersError(OperatorError):
    """As many streams are open as there may be."""

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
    """The task is not in a state in which that can be done: it is not leased, or has its result already."""

    code = "task_state"


class LeaseMismatchError(OperatorError):
    """The task is leased under another lease than the one that was named."""

    code = "lease_mismatch"


class TaskExistsError(OperatorError):
    """Another task of the same sender has the same id."""

    code = "task_exists"


class TaskInvalidError(OperatorError):
    """The task, its result, or what should be done with it is not as the mailbox takes it."""

    code = "task_invalid"


class MailboxFullError(OperatorError):
    """As many tasks wait for this recipient, or in all, as may."""

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
    """A grant of the action is held, but its scope does not admit what is asked."""

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
    """Only who holds or gave the grant, or the operator, may revoke it."""

    code = "grant_not_yours"


class OperatorOnlyError(OperatorError):
    """Only the operator may ask for this."""

    code = "operator_only"


class PeerRefusedError(OperatorError):
    """The peer cannot be let in, or the prefix names none as it stands."""

    code = "peer_refused"


class OperatorTokenError(OperatorError):
    """The operator's token file is a symlink, is not ours, or can be read by others."""

    code = "operator_token_unsafe"


class AttestationError(OperatorError):
    """The message to attest is too long, is not base58, or bears a time that is not now."""

    code = "attestation_refused"


class SecretDeniedError(OperatorError):
    """There is no such secret, or the caller holds no grant that names it: which of both is not said."""

    code = "secret_denied"


class NotSenderError(OperatorError):
    """Only the sender of a task may withdraw it."""

    code = "not_the_sender"
