"""Publish events to subscribers without ever delaying the publisher.

    audit, memory, intents ── publish: no wait ──> [one bounded queue a subscriber] ── receive ──> a stream

A publisher never waits and never fails. A subscriber whose queue is full is dropped at once; after the queued items it
receives ``SlowSubscriberError``. All code here runs on the event loop's thread.
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

# The most items that a subscriber may lag behind. Queues share the items, so a queue costs only its references.
DEPTH: Final = 1024
MOST: Final = 256


@dataclass(frozen=True, slots=True)
class Item:
    """A published event. ``number`` grows by one with each item of any topic since the daemon's start."""

    topic: Topic
    number: int
    value: Any


class Subscription:
    """The receiving end of a subscription."""

    def __init__(self, topics: Collection[Topic], depth: int) -> None:
        self.topics = frozenset(topics)
        self.dropped = False
        self._send: MemoryObjectSendStream[Item]
        self._receive: MemoryObjectReceiveStream[Item]
        self._send, self._receive = anyio.create_memory_object_stream[Item](depth)

    async def receive(self) -> Item | None:
        """Return the next item; None once the feed or the subscription is closed and all earlier items are received.

        Raises:
            errors.SlowSubscriberError: its queue was full once; all items before that were received.
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
        """Stop queueing items; queued ones can still be received."""
        self._send.close()

    def offer(self, item: Item) -> bool:
        """Queue an item; returns False once the subscription takes no more."""
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
        """Close both ends."""
        self._send.close()
        self._receive.close()


class Feed:
    """The feed of a daemon: code that changes a store publishes here, adapters subscribe.

    Args:
        depth: the most items that a subscriber may lag behind.
        most: the most subscribers.
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
        """The number of subscribers."""
        return len(set[Subscription]().union(*self._subscribers.values()))

    @property
    def closed(self) -> bool:
        """Whether the daemon stops."""
        return self._closed

    def publish(self, topic: Topic, value: Any) -> None:
        """Queue ``value`` for each subscriber of ``topic``. It must not change afterwards: all subscribers share it."""
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
        """Subscribe to the topics until the end of the block.

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
        """End every stream because the daemon stops. Later streams end at once."""
        self._closed = True
        for subscribers in self._subscribers.values():
            for one in subscribers:
                one.close()

    def _forget(self, subscription: Subscription) -> None:
        for topic in subscription.topics:
            self._subscribers[topic].discard(subscription)
