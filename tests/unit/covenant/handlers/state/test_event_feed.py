"""Check the event feed: a watcher gets all events in order or a notice of loss, and no publisher waits for it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from covenant.handlers.state import intent_progress
from covenant.handlers.state.event_feed import Feed, Item, Subscription
from covenant.handlers.state.intent_progress import RunningIntents
from policy import errors

pytestmark = pytest.mark.anyio


async def values(subscription: Subscription, count: int) -> list[Any]:
    with anyio.fail_after(60):
        found = [await subscription.receive() for _ in range(count)]
    return [one.value for one in found if isinstance(one, Item)]


async def test_each_hears_its_topics_in_their_order() -> None:
    feed = Feed()
    with feed.subscribe("audit") as rows, feed.subscribe("audit", "memory") as both:
        for number in range(3):
            feed.publish("audit", number)
            feed.publish("memory", -number)
            feed.publish("intent", "unheard")
        assert await values(rows, 3) == [0, 1, 2]
        assert await values(both, 6) == [0, 0, 1, -1, 2, -2]
    assert feed.subscribers == 0


async def test_who_is_slow_is_dropped_and_told_and_others_are_not() -> None:
    feed = Feed(depth=4)
    with feed.subscribe("audit") as slow, feed.subscribe("audit") as quick:
        heard = []
        for number in range(9):
            feed.publish("audit", number)
            heard += await values(quick, 1)
        assert heard == list(range(9))
        # The items before the drop are complete: a stream without a gap, and then its end.
        assert await values(slow, 4) == [0, 1, 2, 3]
        with pytest.raises(errors.SlowSubscriberError):
            await slow.receive()
        assert (feed.dropped, feed.subscribers) == (1, 1)


async def test_publishing_costs_nobody_anything_when_all_are_slow() -> None:
    feed = Feed(depth=1)
    with feed.subscribe("memory"), feed.subscribe("memory"):
        for number in range(1000):
            feed.publish("memory", number)
        assert (feed.dropped, feed.subscribers) == (2, 0)


async def test_there_are_only_so_many() -> None:
    feed = Feed(most=2)
    with feed.subscribe("audit"), feed.subscribe("audit", "memory"), pytest.raises(errors.TooManySubscribersError):
        feed.subscribe("intent").__enter__()
    with feed.subscribe("intent"):
        assert feed.subscribers == 1


async def test_daemon_that_stops_ends_each_stream_after_what_was() -> None:
    feed = Feed()
    with feed.subscribe("audit") as subscription:
        feed.publish("audit", "last")
        feed.close()
        feed.publish("audit", "too late")
        assert await values(subscription, 1) == ["last"]
        assert await subscription.receive() is None
    with feed.subscribe("audit") as later:
        assert await later.receive() is None


async def test_whoever_waits_is_woken() -> None:
    feed = Feed()
    got: list[Any] = []
    with feed.subscribe("audit") as subscription:
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                got.extend(await values(subscription, 1))

            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            feed.publish("audit", "now")
    assert got == ["now"]


async def test_who_comes_late_to_intent_hears_what_it_has_done() -> None:
    feed = Feed()
    intents = RunningIntents(feed)
    intents.say("i", "key", "accepted", 1, agent="a@b")
    with feed.subscribe("intent") as subscription:
        intents.say("i", "somebody else's key is not taken", "run_started", 2, run_id="r")
        assert [one.to_json()["type"] for one in intents.so_far("i")] == ["accepted", "run_started"]
        assert {one.owner for one in intents.so_far("i")} == {"key"}
        intents.say("i", "key", intent_progress.ENDED, 3, status="ok")
        assert intents.so_far("i") == ()
        heard = await values(subscription, 2)
    assert [(one.sequence, one.type) for one in heard] == [(1, "run_started"), (2, intent_progress.ENDED)]
    assert heard[1].to_json() == {"intent_id": "i", "sequence": 2, "type": "ended", "at_ms": 3, "status": "ok"}


async def test_what_is_kept_of_intents_has_end() -> None:
    intents = RunningIntents(Feed())
    for number in range(intent_progress.EVENTS + 5):
        intents.say("one", "key", "tool", number)
    assert [one.sequence for one in intents.so_far("one")] == list(range(5, intent_progress.EVENTS + 5))
    for number in range(intent_progress.INTENTS):
        intents.say(f"i{number}", "key", "accepted", 0)
    assert intents.so_far("one") == ()
    assert intents.so_far("i0") != ()
