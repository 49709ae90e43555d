"""Who watches hears of what happens while it happens, and never holds up whoever does it.

    audit, memory, intents ── publish: no wait ──> [one bounded queue a subscriber] ── receive ──> a stream

A publisher never waits and never fails: a subscriber whose queue is full is dropped there and then, and is told so
after what it had been given (``SlowSubscriberError``). Everything here runs on the event loop's own thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from policy import errors

Topic = Literal["audit", "memory", "intent"]
TOPICS: Final[tuple[Topic, ...]] = ("audit", "memory", "intent")

# What one subscriber may be behind. Items are shared between the queues, so that a queue costs its references.
DEPTH: Final = 1024
MOST: Final = 256


@dataclass(frozen=True, slots=True)
class Item:
    """Something that happened. ``number`` grows by one with each item of any topic since the daemon's start."""

    topic: Topic
    number: int
    value: Any


class Subscription:
    """The receiving end of what one subscriber asked for."""

    def __init__(self, topics: Collection[Topic], depth: int) -> None:
        self.topics = frozenset(topics)
        self.dropped = False
        self._send: MemoryObjectSendStream[Item]
        self._receive: MemoryObjectReceiveStream[Item]
        self._send, self._receive = anyio.create_memory_object_stream[Item](depth)

    async def receive(self) -> Item | None:
        """The next item, or None once the feed or the subscription was closed and everything before was received.

        Raises:
            errors.SlowSubscriberError: its queue was full once; everything before that was received.
        """
        try:
            return await self._receive.receive()
        except anyio.EndOfStream:
            if self.dropped:
                raise errors.SlowSubscriberError(
                    "this stream fell behind and was ended",
                    hint="ask again: what was missed is in the store",
                ) from None
            return None

    def close(self) -> None:
        """Give it nothing more; what it has been given it may still receive."""
        self._send.close()

    def offer(self, item: Item) -> bool:
        """Queue an item; False once nothing more is taken."""
        try:
            self._send.send_nowait(item)
        except anyio.WouldBlock:
            self.dropped = True
            self._send.close()
            return False
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return False
        return True

    def end(self) -> None:
        """Let go of both ends."""
        self._send.close()
        self._receive.close()


class Feed:
    """One per daemon: whoever changes a store publishes here, adapters subscribe.

    Args:
        depth: how many items one subscriber may be behind.
        most: how many subscribers there may be.
    """

    def __init__(self, *, depth: int = DEPTH, most: int = MOST) -> None:
        self._depth, self._most = depth, most
        self._subscribers: dict[Topic, set[Subscription]] = {topic: set() for topic in TOPICS}
        self._number = 0
        self._closed = False
        self.dropped = 0
        self.published: Counter[Topic] = Counter()

    @property
    def subscribers(self) -> int:
        """How many there are."""
        return len(set[Subscription]().union(*self._subscribers.values()))

    def publish(self, topic: Topic, value: Any) -> None:
        """Give ``value`` to each subscriber of ``topic``. It must not be changed afterwards: all share it."""
        self._number += 1
        self.published[topic] += 1
        subscribers = self._subscribers[topic]
        if not subscribers:
            return
        item = Item(topic, self._number, value)
        for gone in [one for one in subscribers if not one.offer(item)]:
            self.dropped += gone.dropped
            self._forget(gone)

    @contextmanager
    def subscribe(self, *topics: Topic) -> Iterator[Subscription]:
        """What is published from now on, until the end of the block.

        Raises:
            errors.TooManySubscribersError: there are ``most`` already.
        """
        if self.subscribers >= self._most:
            raise errors.TooManySubscribersError(f"{self._most} streams are open already", hint="close one of them")
        subscription = Subscription(topics, self._depth)
        for topic in subscription.topics:
            self._subscribers[topic].add(subscription)
        if self._closed:
            subscription.close()
        try:
            yield subscription
        finally:
            self._forget(subscription)
            subscription.end()

    def close(self) -> None:
        """End every stream: the daemon stops. Later ones end at once."""
        self._closed = True
        for subscribers in self._subscribers.values():
            for one in subscribers:
                one.close()

    def _forget(self, subscription: Subscription) -> None:
        for topic in subscription.topics:
            self._subscribers[topic].discard(subscription)
