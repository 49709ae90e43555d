"""Progress events of intents: sent to subscribers, and kept while the intent lives for those that come late.

    intent.py ── say(intent, "run_started", ...) ──> feed topic `intent` ──> GET /intents/:id/events

The result is in memory and in the audit log; the events of an ended intent are dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from covenant.handlers.state.event_feed import Feed
from covenant.wire.parts import AuditEvent

ENDED: Final = "ended"
# What an agent does, under version 1's names. No runner says what it reasons.
_CALL, _RESULT, _FILE = "tool_call", "tool_result", "file_write"
ACTS: Final = frozenset({_CALL, _RESULT, _FILE})
# Of each kind of row: the act, and the tool where the row names none.
_ROWS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "hermes_tool_invoked": (_CALL, {}),
    "hermes_tool_completed": (_RESULT, {}),
    "hermes_approval_requested": (_CALL, {"tool": "approval"}),
    "hermes_approval_resolved": (_RESULT, {"tool": "approval"}),
    "hermes_file_written": (_FILE, {}),
}
# The most events kept for one intent, and the most intents; beyond that the oldest are dropped.
EVENTS: Final = 256
INTENTS: Final = 4096


@dataclass(frozen=True, slots=True)
class IntentEvent:
    """An event of an intent. ``owner`` is its submitter's key; ``sequence`` counts from 0."""

    intent_id: str
    owner: str
    sequence: int
    type: str
    at_ms: int
    fields: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the event as one chunk of a stream."""
        return {
            "intent_id": self.intent_id,
            "sequence": self.sequence,
            "type": self.type,
            "at_ms": self.at_ms,
            **self.fields,
        }


# Called with the events of intents in the current task and its child tasks: links a request to its intent.
HEARD: Final[ContextVar[Callable[[IntentEvent], None] | None]] = ContextVar("HEARD", default=None)


@dataclass(slots=True)
class _Living:
    owner: str
    said: int = 0
    events: deque[IntentEvent] = field(default_factory=lambda: deque(maxlen=EVENTS))


class RunningIntents:
    """The running intents. One per daemon."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._living: dict[str, _Living] = {}
        # The number of intents by outcome: ok, ignored, failed, cancelled.
        self.ended: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._living)

    def say(self, intent_id: str, owner: str, type: str, at_ms: int, **fields: Any) -> None:  # noqa: A002
        """Publish an event. The first event of an intent adds it here, and ``ENDED`` removes it. Never raises."""
        living = self._living.get(intent_id)
        if living is None:
            if len(self._living) >= INTENTS:
                # Only an intent without an ``ENDED`` event can be that old.
                del self._living[next(iter(self._living))]
            living = self._living[intent_id] = _Living(owner)
        event = IntentEvent(intent_id, living.owner, living.said, type, at_ms, fields)
        living.said += 1
        living.events.append(event)
        if type == ENDED:
            del self._living[intent_id]
            self.ended[str(fields.get("status"))] += 1
        self._feed.publish("intent", event)
        if (heard := HEARD.get()) is not None:
            heard(event)

    def heard(self, row: AuditEvent) -> None:
        """Publish what a row of the log says that the agent of a running intent did."""
        fields = row.kind
        about, intent_id = _ROWS.get(str(fields.get("type"))), str(fields.get("intent_id"))
        living = self._living.get(intent_id)
        if about is not None and living is not None:
            told = {name: value for name, value in fields.items() if name not in ("type", "intent_id")}
            self.say(intent_id, living.owner, about[0], row.timestamp_ms, **told, **about[1])

    def so_far(self, intent_id: str) -> Sequence[IntentEvent]:
        """Return the events of a running intent; empty for any other."""
        living = self._living.get(intent_id)
        return tuple(living.events) if living else ()
