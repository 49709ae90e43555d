"""Check networks cut while processes are killed: the caller gets the result, with a thread or without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from sandbox.network import disconnect


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture(params=["a thread", "no thread left"])
def aside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], disconnect.Aside]:
    if request.param == "no thread left":
        monkeypatch.setattr(threading.Thread, "start", _no_thread)
    return lambda: disconnect.Aside(())


def test_what_could_not_be_cut_is_told(aside: Callable[[], disconnect.Aside], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "cut", lambda links: ["the host's end: it is stuck"])
    assert aside().result() == ["the host's end: it is stuck"]


def test_what_went_wrong_is_raised_to_whoever_asks(
    aside: Callable[[], disconnect.Aside], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is not raised in the middle of an end, which has still to kill."""

    def fails(links: Any) -> list[str]:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(disconnect, "cut", fails)
    begun = aside()
    with pytest.raises(OSError, match="Cannot allocate"):
        begun.result()
