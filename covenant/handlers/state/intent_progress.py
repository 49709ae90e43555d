"""What intents do while they do it: told to whoever watches, and kept as long as the intent lives for who comes late.

    intent.py ── say(intent, "run_started", ...) ──> feed topic `intent` ──> GET /intents/:id/events

The result is not here: it is in memory and in the audit log, and the events of an intent that has ended are gone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from covenant.handlers.state.event_feed import Feed

ENDED: Final = "ended"
# What one intent can have kept for it, and how many intents; those that say most lose their oldest words.
EVENTS: Final = 256
INTENTS: Final = 4096


@dataclass(frozen=True, slots=True)
class IntentEvent:
    """Something that an intent did. ``owner`` is the key of whoever submitted it; ``sequence`` counts from 0."""

    intent_id: str
    owner: str
    sequence: int
    type: str
    at_ms: int
    fields: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As one chunk of a stream."""
        return {
            "intent_id": self.intent_id,
            "sequence": self.sequence,
            "type": self.type,
            "at_ms": self.at_ms,
            **self.fields,
        }


# Hears what the intents of its own task say, and of the tasks that this starts: which intent a request became.
HEARD: Final[ContextVar[Callable[[IntentEvent], None] | None]] = ContextVar("HEARD", default=None)


@dataclass(slots=True)
class _Living:
    owner: str
    said: int = 0
    events: deque[IntentEvent] = field(default_factory=lambda: deque(maxlen=EVENTS))


class Live:
    """The intents that live now. One per daemon."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._living: dict[str, _Living] = {}
        # By how they ended: ok, ignored, failed, cancelled.
        self.ended: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._living)

    def say(self, intent_id: str, owner: str, type: str, at_ms: int, **fields: Any) -> None:  # noqa: A002
        """Tell something; the first word of an intent makes it live, and ``ENDED`` is its last. It never fails."""
        living = self._living.get(intent_id)
        if living is None:
            if len(self._living) >= INTENTS:
                # Only an intent whose end nobody said can be that old.
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

    def so_far(self, intent_id: str) -> Sequence[IntentEvent]:
        """What a living intent has said; nothing of any other."""
        living = self._living.get(intent_id)
        return tuple(living.events) if living else ()
