"""Check signals during a run: they end a live run in order, and do not interrupt its cleanup."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from policy import errors
from sandbox.shim import signals as shim_signals


@pytest.fixture
def own() -> Iterator[None]:
    with shim_signals.detach_from_terminal():
        yield


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_is_told_over_descriptor_and_raises_nothing(number: signal.Signals) -> None:
    with shim_signals.DeferredSignals() as signals:
        ((fd, act),) = signals.handlers().items()
        assert not select.select([fd], [], [], 0)[0]
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([fd], [], [], 60)[0]
        assert isinstance(act(), errors.StoppedError)
    assert signals.pending
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.usefixtures("own")
def test_before_and_after_it_raises_as_ever() -> None:
    with shim_signals.DeferredSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not signals.pending


@pytest.mark.usefixtures("own")
def test_what_ended_without_one_leaves_everything_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with shim_signals.DeferredSignals() as signals:
        signals.handlers()
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_nobodys_signals_but_ours_are_held_back() -> None:
    """Nothing is held outside ``detach_from_terminal``, at its exit, and in a thread that no signal reaches."""
    with shim_signals.DeferredSignals() as signals:
        assert signals.handlers() == {}
    with shim_signals.detach_from_terminal(), shim_signals.DeferredSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.handlers() == {}
    found: list[object] = []
    with shim_signals.detach_from_terminal(), shim_signals.DeferredSignals() as signals:
        thread = threading.Thread(target=lambda: found.append(signals.handlers()))
        thread.start()
        thread.join()
    assert found == [{}]


@pytest.mark.usefixtures("own")
def test_it_is_held_back_whichever_thread_takes_it() -> None:
    """Python runs the handler in the main thread even if that thread's mask blocks the signal."""
    with shim_signals.DeferredSignals() as signals:
        signals.hold()
        thread = threading.Thread(target=signal.raise_signal, args=(signal.SIGTERM,))
        thread.start()
        thread.join()
        time.sleep(0.01)  # a signal would raise here
        assert signals.pending
        with pytest.raises(errors.StoppedError):
            signals.check()


@pytest.mark.usefixtures("own")
def test_whoever_must_be_dead_is_killed_before_anybody_looks() -> None:
    killed: list[str] = []

    def fails() -> None:
        killed.append("tried")
        raise errors.KernelError("it survives")

    with shim_signals.DeferredSignals() as signals:
        ((_, look),) = signals.handlers(lambda: killed.append("first")).items()
        assert signals.handlers(fails).keys() == signals.handlers(fails).keys()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert killed == ["tried"]
        with pytest.raises(errors.KernelError, match="it survives"):  # the look raises the error
            look()
    assert killed == ["tried", "tried"]


@pytest.mark.usefixtures("own")
def test_nobody_is_killed_once_it_is_over() -> None:
    """A descriptor or process number may be reused by then."""
    killed: list[str] = []
    with shim_signals.DeferredSignals() as signals:
        signals.handlers(lambda: killed.append("alive"))
        signals.handlers()
        os.kill(os.getpid(), signal.SIGTERM)
    assert killed == []


@pytest.mark.usefixtures("own")
def test_outermost_block_holds_and_whoever_goes_on_can_be_told_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with shim_signals.DeferredSignals() as signals:
        with signals:
            signals.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.pending
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("own")
def test_whoever_is_on_way_out_is_not_interrupted_again() -> None:
    signals = shim_signals.DeferredSignals()

    def out() -> None:
        with signals:
            signals.hold()
            os.kill(os.getpid(), signal.SIGTERM)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        out()
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("late", [False, True])
def test_run_that_was_told_ended_for_that_unless_it_had_ended_by_itself(late: bool) -> None:
    over = [late]
    with shim_signals.DeferredSignals() as signals:
        (look,) = signals.handlers(over.clear, over=lambda: over[0]).values()
        assert signals.outcome(137) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert over == [], "it is looked before it is killed"
        assert isinstance(signals.outcome(137), errors.StoppedError) is not late
        assert isinstance(look(), errors.StoppedError) is not late
        assert signals.outcome(0) is None


@pytest.mark.usefixtures("own")
def test_what_is_ignored_stays_ignored() -> None:
    """nohup(1) relies on this."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with shim_signals.DeferredSignals() as signals:
        signals.handlers()
        os.kill(os.getpid(), signal.SIGHUP)
    assert not signals.pending
