"""A signal that comes while a run is held ends it in order; one that comes while it is cleared away cuts nothing."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from policy import errors
from sandbox import surroundings


@pytest.fixture
def own() -> Iterator[None]:
    with surroundings.own():
        yield


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_is_told_over_a_descriptor_and_raises_nothing(number: signal.Signals) -> None:
    with surroundings.HeldBack() as signals:
        ((fd, act),) = signals.watches().items()
        assert not select.select([fd], [], [], 0)[0]
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([fd], [], [], 5)[0]
        assert isinstance(act(), errors.StoppedError)
    assert signals.told
    # The way out is taken once, and whoever is on it is not interrupted again.
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.usefixtures("own")
def test_before_and_after_it_raises_as_ever() -> None:
    with surroundings.HeldBack() as signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not signals.told


@pytest.mark.usefixtures("own")
def test_what_ended_without_one_leaves_everything_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with surroundings.HeldBack() as signals:
        signals.watches()
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_nobodys_signals_but_ours_are_held_back() -> None:
    """Outside ``own``, on its way out, and in a thread that no signal reaches there is nothing to hold."""
    with surroundings.HeldBack() as signals:
        assert signals.watches() == {}
    with surroundings.own(), surroundings.HeldBack() as signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.watches() == {}
    found: list[object] = []
    with surroundings.own(), surroundings.HeldBack() as signals:
        thread = threading.Thread(target=lambda: found.append(signals.watches()))
        thread.start()
        thread.join()
    assert found == [{}]


@pytest.mark.usefixtures("own")
def test_what_belongs_together_is_done_before_it_raises() -> None:
    """Whichever thread took the signal: Python runs the handler in the main thread all the same."""
    done = []

    def both() -> None:
        with surroundings.put_off():
            thread = threading.Thread(target=signal.raise_signal, args=(signal.SIGTERM,))
            thread.start()
            thread.join()
            time.sleep(0.01)  # here it would
            done.append("both")

    with pytest.raises(KeyboardInterrupt):
        both()
    assert done == ["both"]


@pytest.mark.usefixtures("own")
def test_what_is_held_back_is_not_put_off() -> None:
    with surroundings.HeldBack() as signals:
        signals.watches()
        with surroundings.put_off():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.told


@pytest.mark.usefixtures("own")
def test_nothing_is_put_off_where_nothing_raises() -> None:
    with surroundings.put_off():
        pass
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    with surroundings.put_off():  # on the way out
        os.kill(os.getpid(), signal.SIGTERM)
    thread = threading.Thread(target=surroundings.put_off().__enter__)
    thread.start()
    thread.join()


@pytest.mark.usefixtures("own")
def test_what_is_ignored_stays_ignored() -> None:
    """nohup(1)."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with surroundings.HeldBack() as signals:
        signals.watches()
        os.kill(os.getpid(), signal.SIGHUP)
    assert not signals.told
