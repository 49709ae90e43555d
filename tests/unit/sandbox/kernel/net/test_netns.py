"""Check a background thread: its caller gets its result or error at the wait, and nowhere else."""

from __future__ import annotations

import threading

import pytest

from policy import errors
from sandbox.kernel.net import netns


def test_call_aside_gives_its_value_or_raises_what_it_raised() -> None:
    def fails() -> int:
        raise errors.KernelError("it does not say")

    assert netns.aside(lambda: 7)() == 7
    with pytest.raises(errors.KernelError, match="it does not say"):
        netns.aside(fails)()


def test_where_no_thread_is_left_it_is_error_of_machine_and_none_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a look that starts two threads would leave the first behind, and end a run that it should only watch."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    wait = netns.aside(lambda: 7)
    with pytest.raises(OSError, match="can't start new thread"):
        wait()
    with pytest.raises(errors.KernelError, match="network namespace"):
        netns.make()
