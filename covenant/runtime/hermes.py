"""Runs at a Hermes API: start, watch, approve and stop them there. No sandbox of this machine contains such an agent.

Its manifest is therefore enforced on the run's stream of events, as far as that is possible. A run that starts a tool
outside ``tools_allowed`` is stopped when the stream reports it, and fails. The policy answers approvals, and no other
answer is accepted. A run without a readable stream is stopped. The effects of a tool before its report remain;
``docs/intents.md`` says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self

import anyio
from pydantic_core import to_json

from covenant.runtime.hermes_api import HermesApi, shown
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult, Spent, Usage, with_spent
from covenant.wire.parts import Approval
from covenant.wire.types import AgentId
from policy import contract, errors

POLL_SECONDS: Final = 0.25
# The limit for the last events after a run's end, and for a stop request.
_LAST_SECONDS: Final = 10.0
_ENDED: Final = frozenset({"completed", "failed", "cancelled"})
_OVER: Final = frozenset({"run.completed", "run.failed", "run.cancelled"})
_DENY, _ONCE = "deny", "once"
# The most runtime events that are kept for the caller.
_MOST_EVENTS: Final = 256
# Each event has a durable row, and each approval a place in the operator's list: a run with more is stopped.
_MOST_ROWS: Final = 10_000
_MOST_WAITING: Final = 64
# A larger count in a response is invalid.
_MOST_RESOLVED: Final = 2**31


class HermesLog(Protocol):
    """The part of the audit log that a run needs: a row is on disk when its call returns."""

    async def append(self, kind: str, fields: Mapping[str, Any], issuer: AgentId | None = None) -> str:
        """Write a row and return its id."""


# Refuses a card whose package was not signed by an operator.
Verify = Callable[[Card], Awaitable[None]]


@dataclass
class _Run:
    """One run in progress."""

    card: Card
    intent_id: str
    run_id: str
    caller: AgentId
    # Why we end it; the first reason is kept.
    reason: errors.CovenantError | None = None
    ending: anyio.Event = field(default_factory=anyio.Event)
    heard: anyio.Event = field(default_factory=anyio.Event)
    runtime_events: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    # Choices that we posted and whose echo has not arrived yet.
    posted: list[str] = field(default_factory=list)
    rows: int = 0
    waiting: dict[str, tuple[Approval, str | None]] = field(default_factory=dict)

    def end(self, reason: errors.CovenantError) -> None:
        """Stop the run for this reason."""
        self.reason = self.reason or reason
        self.ending.set()


class Hermes:
    """``runner.Runner`` for the runtime hermes; use as an async context manager. Without an ``api`` it refuses every
    run."""

    def __init__(self, api: HermesApi | None, *, audit: HermesLog, verify: Verify, now_ms: Callable[[], int]) -> None:
        self._api, self._audit, self._verify, self._now_ms = api, audit, verify, now_ms
        self._live: dict[str, _Run] = {}
        self._probed = False

    async def __aenter__(self) -> Self:
        if self._api is not None:
            await self._api.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._api is not None:
            await self._api.__aexit__(kind, error, trace)

    async def probe(self) -> None:
        """Check once that the API has the features that a run needs; a success is remembered.

        Raises:
            errors.HermesUnconfiguredError, errors.HermesError: it has not, or the check failed.
        """
        api = self._configured()
        if not self._probed:
            if missing := await api.missing():
                raise errors.HermesError(
                    f"the Hermes API lacks `{missing[0]}`", hint="hermes-agent 0.12 or later has what runs need"
                )
            self._probed = True

    async def run(self, card: Card, intent: Intent, *, caller: AgentId, deadline: int | None) -> RunResult:
        """As ``runner.Runner``."""
        api = self._configured()
        await self._verify(card)
        await self.probe()
        limit_ms = card.manifest.resources.cpu_ms_per_task
        clock = "cpu_ms_per_task"
        if deadline is not None and deadline - self._now_ms() < limit_ms:
            limit_ms, clock = max(0, deadline - self._now_ms()), "timeout"
        began = time.monotonic()
        try:
            run_id = await self._start(api, intent)
        except anyio.get_cancelled_exc_class():
            await self._stop_unanswered(api, intent)
            raise
        run = _Run(card, intent.id, run_id, caller)
        self._live[intent.id] = run
        status: dict[str, Any] = {}
        try:
            with anyio.move_on_after(limit_ms / 1000):
                status = await self._watched(api, run)
        except BaseException:
            # After a cancellation or an error the run must not continue alone.
            await self._stop(api, run)
            raise
        finally:
            del self._live[intent.id]
        spent = Spent(Usage(None, None, int((time.monotonic() - began) * 1000)), run_id)
        if not status:
            await self._stop(api, run)
            run.reason = run.reason or errors.DeadlineError(
                f"still running after {limit_ms / 1000:g} s (clock: {clock})", clock=clock
            )
        if run.reason is not None:
            raise with_spent(run.reason, spent)
        return _result(run, status, spent)

    async def end(self, intent_id: str, *, reason: str, whole: bool = False) -> bool:
        """As ``runner.Runner``; a run of the API has no children, and no grace."""
        run = self._live.get(intent_id)
        if run is None:
            return False
        run.end(errors.KilledError(f"ended: {reason}"))
        return True

    def approvals(self) -> tuple[Approval, ...]:
        """Return the approvals that wait for an operator, oldest first."""
        waiting = (one for run in self._live.values() for one, _ in run.waiting.values())
        return tuple(sorted(waiting, key=lambda one: one.requested_at))

    async def resolve(self, approval_id: str, choice: str, *, by: AgentId) -> int:
        """Answer a waiting approval. Returns the number of requests that this resolved.

        Raises:
            errors.NoApprovalError: none waits under this id, or it does not offer this choice.
            errors.HermesError: it could not be posted; it no longer waits here, and the API's own limit ends it.
        """
        run = next((one for one in self._live.values() if approval_id in one.waiting), None)
        if run is None:
            raise errors.NoApprovalError("no such approval waits", hint="covenant approvals list")
        approval, request_id = run.waiting[approval_id]
        if choice not in approval.choices:
            raise errors.NoApprovalError(f"it offers {', '.join(f'`{one}`' for one in approval.choices)}")
        # Removed before the first await: of two concurrent answers only one is sent.
        del run.waiting[approval_id]
        return await self._answer(run, choice, request_id, issuer=by)

    def _configured(self) -> HermesApi:
        if self._api is None:
            raise errors.HermesUnconfiguredError("no Hermes API is configured", hint="set HERMES_API_BASE_URL")
        return self._api

    async def _start(self, api: HermesApi, intent: Intent) -> str:
        try:
            return await api.start(intent.text, intent_id=intent.id)
        except errors.HermesError as e:
            if "status" in e.details:  # the API refused
                raise
            # The run may have begun although its answer was lost: the same key names the same run, and starts no second
            # one.
            return await api.start(intent.text, intent_id=intent.id)

    async def _stop_unanswered(self, api: HermesApi, intent: Intent) -> None:
        """Stop a run whose start was cancelled before its answer came: the same key asks again for its id."""
        with anyio.move_on_after(_LAST_SECONDS, shield=True), contextlib.suppress(errors.HermesError):
            await api.stop(await api.start(intent.text, intent_id=intent.id))

    async def _watched(self, api: HermesApi, run: _Run) -> dict[str, Any]:
        """Return the run's last status; empty if it is to be stopped."""
        status: dict[str, Any] = {}
        async with anyio.create_task_group() as group:
            group.start_soon(self._listen, api, run)
            try:
                status = await self._polled(api, run)
            except errors.HermesError as e:
                run.end(e)
            group.cancel_scope.cancel()
        return {} if run.reason is not None else status

    async def _polled(self, api: HermesApi, run: _Run) -> dict[str, Any]:
        status: dict[str, Any] = {}
        patience = _LAST_SECONDS
        while not run.ending.is_set() and patience > 0:
            status = await api.status(run.run_id)
            if status.get("status") in _ENDED:
                break
            # The stream ended but the run did not: allow a moment for the two to agree.
            patience -= POLL_SECONDS if run.heard.is_set() else 0
            with anyio.move_on_after(POLL_SECONDS):
                await run.ending.wait()
        if patience <= 0:
            run.end(errors.HermesError("the events of a run ended before it did: it cannot be watched"))
        # The events of its last acts must still arrive and be checked.
        if not run.ending.is_set():
            with anyio.move_on_after(_LAST_SECONDS):
                await run.heard.wait()
        if not run.heard.is_set():
            run.end(errors.HermesError("the events of a run that is over do not end"))
        return status

    async def _listen(self, api: HermesApi, run: _Run) -> None:
        try:
            async for event in api.events(run.run_id):
                await self._event(run, event)
                if run.ending.is_set() or event.get("event") in _OVER:
                    break
        except errors.CovenantError as e:
            # Also for a row that could not be written: an unlogged run must not continue.
            run.end(e)
        finally:
            run.heard.set()

    async def _event(self, run: _Run, event: Mapping[str, Any]) -> None:
        act = {
            "tool.started": self._tool_started,
            "tool.completed": self._tool_completed,
            "approval.request": self._approval_requested,
            "approval.responded": self._approval_responded,
            "file.written": self._file_written,
        }.get(shown(event.get("event")))
        if act is None:
            return
        run.rows += 1
        if run.rows > _MOST_ROWS:
            run.end(errors.HermesError(f"a run said more than {_MOST_ROWS} things that are written down"))
            return
        await act(run, event)

    async def _tool_started(self, run: _Run, event: Mapping[str, Any]) -> None:
        tool = shown(event.get("tool"))
        preview = event.get("preview")
        digest = hashlib.sha256((preview if isinstance(preview, str) else "").encode()).hexdigest()
        await self._row(run, "hermes_tool_invoked", {"tool": tool, "preview_hash_hex": digest})
        _keep(run.runtime_events, {"event": "tool.started", "tool": tool})
        if tool not in run.card.manifest.hermes.tools_allowed:
            run.end(
                errors.ToolRefusedError(
                    f"the run used the tool `{tool}`, which is not in hermes.tools_allowed",
                    hint="name it there and sign the package again, if the agent may use it",
                )
            )

    async def _tool_completed(self, run: _Run, event: Mapping[str, Any]) -> None:
        seconds, failed = event.get("duration"), event.get("error")
        known = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < 10**9
        row = {
            "tool": shown(event.get("tool")),
            "duration_ms": int(seconds * 1000) if known else 0,  # type: ignore[operator]
            "error": bool(failed),
        }
        await self._row(run, "hermes_tool_completed", row)
        _keep(run.runtime_events, {"event": "tool.completed", **row})

    async def _file_written(self, run: _Run, event: Mapping[str, Any]) -> None:
        size = event.get("bytes")
        row = {"path": shown(event.get("path")), "bytes": size if type(size) is int and 0 <= size < 2**63 else 0}
        await self._row(run, "hermes_file_written", row)
        _keep(run.files, row)

    async def _approval_requested(self, run: _Run, event: Mapping[str, Any]) -> None:
        offered = event.get("choices")
        choices = tuple(shown(one) for one in offered[:8] if isinstance(one, str)) if isinstance(offered, list) else ()
        choices = choices or (_ONCE, _DENY)
        request_id = event.get("request_id")
        asked = request_id[:200] if isinstance(request_id, str) else None
        await self._row(run, "hermes_approval_requested", {"choices": list(choices)})
        policy = run.card.manifest.hermes.approval_policy
        if policy != "operator-prompt":
            await self._answer(run, _ONCE if policy == "auto-once" else _DENY, asked)
            return
        if len(run.waiting) >= _MOST_WAITING:
            run.end(errors.HermesError(f"a run asks for more than {_MOST_WAITING} approvals at once"))
            return
        approval = Approval(
            id=str(uuid.uuid4()),
            intent_id=run.intent_id,
            run_id=run.run_id,
            agent_id=run.card.id,
            description=shown(event.get("description")),
            command=shown(event.get("command")),
            choices=choices,
            requested_at=self._now_ms(),
        )
        run.waiting[approval.id] = (approval, asked)

    async def _approval_responded(self, run: _Run, event: Mapping[str, Any]) -> None:
        choice = shown(event.get("choice"))
        if choice in run.posted:
            run.posted.remove(choice)
            return
        # The approval was answered at the API itself.
        run.waiting.clear()
        resolved = event.get("resolved")
        count = resolved if type(resolved) is int and 0 <= resolved < _MOST_RESOLVED else 1
        await self._row(run, "hermes_approval_resolved", {"choice": choice, "resolved": count})
        if run.card.manifest.hermes.approval_policy != "operator-prompt" and choice != _DENY:
            run.end(errors.ToolRefusedError("somebody else approved what the run's policy is to answer"))

    async def _answer(self, run: _Run, choice: str, request_id: str | None, issuer: AgentId | None = None) -> int:
        """Post a choice. The log has `hermes_approval_answered` before, and `hermes_approval_resolved` after it."""
        await self._row(run, "hermes_approval_answered", {"choice": choice}, issuer)
        run.posted.append(choice)
        resolved = min(await self._configured().approve(run.run_id, choice, request_id), _MOST_RESOLVED)
        await self._row(run, "hermes_approval_resolved", {"choice": choice, "resolved": resolved}, issuer)
        return resolved

    async def _row(self, run: _Run, kind: str, fields: Mapping[str, Any], issuer: AgentId | None = None) -> None:
        about = {"intent_id": run.intent_id, "run_id": run.run_id}
        await self._audit.append(kind, {**about, **fields}, issuer or run.caller)

    async def _stop(self, api: HermesApi, run: _Run) -> None:
        """Stop the run, shielded; a failure is added to the reason of the stop."""
        with anyio.move_on_after(_LAST_SECONDS, shield=True):
            try:
                await api.stop(run.run_id)
            except errors.HermesError as e:
                if run.reason is not None:
                    errors.also(run.reason, f"it could not be stopped: {e}")


def _keep(kept: list[dict[str, Any]], one: dict[str, Any]) -> None:
    if len(kept) < _MOST_EVENTS:
        kept.append(one)


def _result(run: _Run, status: Mapping[str, Any], spent: Spent) -> RunResult:
    output = status.get("output")
    if status.get("status") != "completed":
        said = status.get("error")
        words = shown(said.get("message") if isinstance(said, dict) else said)
        raise with_spent(
            errors.RemoteRunError(f"the run was {shown(status.get('status'))}: {words or 'no reason given'}"), spent
        )
    if not isinstance(output, str):
        raise with_spent(errors.MalformedOutputError("the run was completed without an output"), spent)
    # Measured as JSON, where a control character takes six bytes: the same count as for the line of a local agent.
    if len(to_json(output)) > contract.RESULT_BYTES:
        raise with_spent(errors.OutputTooLargeError(f"the output is over {contract.RESULT_BYTES} bytes"), spent)
    return RunResult(
        text=output,
        runtime_events=tuple(run.runtime_events),
        files=tuple(run.files),
        usage=spent.usage,
        run_id=run.run_id,
    )
