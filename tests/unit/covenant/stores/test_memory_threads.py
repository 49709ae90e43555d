"""Check the search thread: its order, its errors, and that a job completes after its caller is cancelled."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import anyio
import pytest

from covenant.stores.memory.index.threads import Thread
from policy import errors

pytestmark = pytest.mark.anyio


@pytest.fixture
def thread() -> Iterator[Thread]:
    made = Thread("test")
    yield made
    made.close()


async def test_it_does_one_thing_after_other_off_loop(thread: Thread) -> None:
    done: list[int] = []
    threads: set[threading.Thread] = set()

    async def give(number: int) -> None:
        def act() -> None:
            done.append(number)
            threads.add(threading.current_thread())

        await thread.run(act)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(give, number)
    assert done == list(range(20))
    assert threads == {thread._thread}


async def test_what_goes_wrong_goes_to_whoever_asked_and_to_no_other(thread: Thread) -> None:
    def fail() -> None:
        raise KeyError("this one's")

    with pytest.raises(KeyError, match="this one's"):
        await thread.run(fail)
    begun = thread.begin(fail)
    assert await thread.run(lambda: 7) == 7
    with pytest.raises(KeyError):
        begun.result()


async def test_what_was_given_is_done_though_nobody_waits(thread: Thread) -> None:
    going, go_on, done = threading.Event(), threading.Event(), []

    def act() -> None:
        going.set()
        assert go_on.wait(60)
        done.append(1)

    async with anyio.create_task_group() as group:
        group.start_soon(thread.run, act)
        await anyio.to_thread.run_sync(going.wait, 60)
        group.start_soon(thread.run, lambda: done.append(2))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
        go_on.set()
    assert done == [1, 2]


async def test_closed_one_takes_nothing_and_has_done_rest(thread: Thread) -> None:
    done: list[int] = []
    begun = thread.begin(lambda: done.append(1))
    thread.close()
    assert (done, begun.done()) == ([1], True)
    with pytest.raises(errors.MemoryStoreError, match="closed"):
        await thread.run(lambda: None)
    with pytest.raises(errors.MemoryStoreError, match="closed"):
        thread.begin(lambda: None)


async def test_who_gives_much_waits_for_itself_and_others_have_their_turns(thread: Thread) -> None:
    going, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def first() -> None:
        going.set()
        assert go_on.wait(60)
        # Submitted during its caller's own turn: other callers come first.
        thread.begin(lambda: done.append("carol"), "carol")

    thread.begin(first, "alice")
    await anyio.to_thread.run_sync(going.wait, 60)
    given = [("alice", f"alice {n}") for n in range(4)] + [("bob", f"bob {n}") for n in range(2)] + [(None, "operator")]
    last = [thread.begin(functools.partial(done.append, what), whose) for whose, what in given]
    go_on.set()
    for one in last:
        await anyio.to_thread.run_sync(one.result, 60)
    assert done == ["bob 0", "operator", "carol", "alice 0", "bob 1", "alice 1", "alice 2", "alice 3"]


async def test_closed_one_has_done_rest_of_everybody() -> None:
    thread = Thread("test")
    going, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        going.set()
        assert go_on.wait(60)

    thread.begin(first, "alice")
    await anyio.to_thread.run_sync(going.wait, 60)
    for number in range(9):
        thread.begin(functools.partial(done.append, number), "alice" if number % 3 else "bob")
    go_on.set()
    await anyio.to_thread.run_sync(thread.close)
    assert sorted(done) == list(range(9))
