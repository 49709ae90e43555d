"""Check group commit: the results and their order, also if a writer is cancelled or the disk fails."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from covenant.stores import group_commit
from policy import errors

pytestmark = pytest.mark.anyio

Answers = Sequence[str | Exception]
Make = Callable[..., "group_commit.GroupCommit[int, str]"]


class Gate:
    """A ``write`` that waits for the test's release, and records the groups that it got."""

    def __init__(self, *, opened: bool = False) -> None:
        self.groups: list[list[int]] = []
        self.thread = threading.current_thread()
        self.entered = threading.Event()
        self.go = threading.Event()
        if opened:
            self.go.set()

    def __call__(self, items: Sequence[int]) -> Answers:
        self.groups.append(list(items))
        self.thread = threading.current_thread()
        self.entered.set()
        assert self.go.wait(60)
        return [f"wrote {item}" for item in items]

    async def on_the_loop(self, items: Sequence[int]) -> Answers:
        self.groups.append(list(items))
        self.entered.set()
        assert await anyio.to_thread.run_sync(self.go.wait, 60)
        return [f"wrote {item}" for item in items]

    async def is_entered(self) -> None:
        assert await anyio.to_thread.run_sync(self.entered.wait, 60)


@pytest.fixture(params=["thread", "loop"])
def make(request: pytest.FixtureRequest) -> Make:
    def made(gate: Gate, most: int = 1024) -> group_commit.GroupCommit[int, str]:
        if request.param == "thread":
            return group_commit.GroupCommit(gate, what="the test", most=most)
        return group_commit.LoopGroupCommit(gate.on_the_loop, what="the test", most=most)

    return made


async def submitted(queue: group_commit.GroupCommit[int, str], item: int) -> str:
    return await queue.submit(item)


async def test_what_waits_is_written_together_in_its_order(make: Make) -> None:
    gate = Gate()
    queue = make(gate, most=3)
    first = asyncio.ensure_future(submitted(queue, 0))
    await gate.is_entered()
    others = [asyncio.ensure_future(submitted(queue, n)) for n in range(1, 6)]
    await anyio.lowlevel.checkpoint()
    gate.go.set()
    with anyio.fail_after(60):
        assert await first == "wrote 0"
        assert [await other for other in others] == [f"wrote {n}" for n in range(1, 6)]
    assert gate.groups == [[0], [1, 2, 3], [4, 5]]
    await queue.close("it was closed")


async def test_what_was_cancelled_before_it_was_taken_is_never_written(make: Make) -> None:
    gate = Gate()
    queue = make(gate)
    first = asyncio.ensure_future(submitted(queue, 0))
    await gate.is_entered()
    others = [asyncio.ensure_future(submitted(queue, n)) for n in (1, 2, 3)]
    await anyio.lowlevel.checkpoint()
    others[1].cancel()
    await anyio.lowlevel.checkpoint()
    gate.go.set()
    with anyio.fail_after(60):
        assert [await first, await others[0], await others[2]] == ["wrote 0", "wrote 1", "wrote 3"]
    assert others[1].cancelled()
    assert gate.groups == [[0], [1, 3]]
    await queue.close("it was closed")


async def test_who_goes_away_meanwhile_holds_up_nobody(make: Make) -> None:
    gate = Gate()
    queue = make(gate)
    tasks = [asyncio.ensure_future(submitted(queue, n)) for n in range(3)]
    await gate.is_entered()
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    gate.go.set()
    with anyio.fail_after(60):
        assert [await task for task in tasks[1:]] == ["wrote 1", "wrote 2"]
        assert await submitted(queue, 3) == "wrote 3"
        await queue.close("it was closed")
    assert gate.groups == [[0, 1, 2], [3]]


def odd(items: Sequence[int]) -> Answers:
    return [ValueError(f"{item} is odd") if item % 2 else f"wrote {item}" for item in items]


async def odd_here(items: Sequence[int]) -> Answers:
    return odd(items)


@pytest.mark.parametrize(
    "queue",
    [
        lambda: group_commit.GroupCommit(odd, what="the test"),
        lambda: group_commit.LoopGroupCommit(odd_here, what="the test"),
    ],
)
async def test_answer_error_is_its_owners_alone(
    queue: Callable[[], group_commit.GroupCommit[int, str]],
) -> None:
    made = queue()
    with anyio.fail_after(60):
        found = await asyncio.gather(*(submitted(made, n) for n in range(4)), return_exceptions=True)
        assert [str(one) for one in found] == ["wrote 0", "1 is odd", "wrote 2", "3 is odd"]
        assert await submitted(made, 4) == "wrote 4"
        await made.close("it was closed")


def fails(items: Sequence[int]) -> Answers:
    raise OSError(5, "Input/output error")


async def fails_here(items: Sequence[int]) -> Answers:
    return fails(items)


def too_few(items: Sequence[int]) -> Answers:
    return []


async def too_few_here(items: Sequence[int]) -> Answers:
    return []


@pytest.mark.parametrize(
    "queue",
    [
        lambda: group_commit.GroupCommit(fails, what="the test"),
        lambda: group_commit.LoopGroupCommit(fails_here, what="the test"),
        lambda: group_commit.GroupCommit(too_few, what="the test"),
        lambda: group_commit.LoopGroupCommit(too_few_here, what="the test"),
    ],
)
async def test_after_write_that_failed_nothing_is_taken(
    queue: Callable[[], group_commit.GroupCommit[int, str]],
) -> None:
    made = queue()
    with anyio.fail_after(60):
        found = await asyncio.gather(*(submitted(made, n) for n in range(3)), return_exceptions=True)
        assert [type(one) for one in found] == [errors.StoreError] * 3
        assert len({id(one) for one in found}) == 3
        with pytest.raises(errors.StoreError, match="the test takes no more records"):
            await submitted(made, 4)
        await made.close("it was closed")


async def test_closing_waits_and_then_refuses(make: Make) -> None:
    gate = Gate()
    queue = make(gate)
    waiting = asyncio.ensure_future(submitted(queue, 1))
    await gate.is_entered()
    closing = asyncio.ensure_future(queue.close("it was closed"))
    await anyio.lowlevel.checkpoint()
    assert not closing.done()
    with pytest.raises(errors.StoreError, match="it was closed"):
        await submitted(queue, 2)
    gate.go.set()
    with anyio.fail_after(60):
        assert await waiting == "wrote 1"
        await closing
        await queue.close("again")


async def test_answers_are_told_in_order_of_writing_whoever_went_away() -> None:
    gate, told = Gate(), list[str | Exception]()
    done: list[str] = []
    queue: group_commit.GroupCommit[int, str] = group_commit.GroupCommit(gate, what="the test", told=told.extend)

    async def write(n: int) -> None:
        done.append(await queue.submit(n))
        # A writer continues only after `told` was called for its group.
        assert done[-1] in told

    tasks = [asyncio.ensure_future(write(n)) for n in range(4)]
    await gate.is_entered()
    tasks[1].cancel()
    gate.go.set()
    with anyio.fail_after(60):
        await asyncio.wait(tasks)
        await write(4)
        await queue.close("it was closed")
    assert told == [f"wrote {n}" for n in range(5)]
    assert done == [f"wrote {n}" for n in (0, 2, 3, 4)]


async def test_who_is_told_and_fails_keeps_nobody_waiting() -> None:
    def told(answers: Answers) -> None:
        raise ValueError("a listener's own")

    reported: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    try:
        queue: group_commit.GroupCommit[int, str] = group_commit.GroupCommit(
            Gate(opened=True), what="the test", told=told
        )
        with anyio.fail_after(60):
            assert await submitted(queue, 1) == "wrote 1"
            assert await submitted(queue, 2) == "wrote 2"
            await queue.close("it was closed")
    finally:
        loop.set_exception_handler(None)
    assert [str(one) for one in reported] == ["a listener's own"] * 2


def test_loop_that_ended_meanwhile_leaves_thread_to_end() -> None:
    gate = Gate()

    async def begun() -> None:
        queue: group_commit.GroupCommit[int, str] = group_commit.GroupCommit(gate, what="the test")
        asyncio.ensure_future(submitted(queue, 1))  # noqa: RUF006 - it ends with the loop
        await gate.is_entered()

    asyncio.run(begun())
    assert gate.thread is not threading.current_thread()
    gate.go.set()
    # The queue is unreferenced now, so its thread ends.
    gc.collect()
    gate.thread.join(60)
    assert not gate.thread.is_alive()
    assert gate.groups == [[1]]
