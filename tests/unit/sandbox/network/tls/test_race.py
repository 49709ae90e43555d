"""Attempts to connect in turn, with socket pairs in place of the network and a clock that the test moves."""

from __future__ import annotations

import socket

import pytest

from sandbox.network.tls import race
from sandbox.network.tls.race import Race, in_turn


def silent() -> socket.socket:
    """An attempt that is never decided."""
    made = socket.socket()
    made.setblocking(False)
    return made


@pytest.mark.parametrize(
    ("first", "others", "expected"),
    [
        ("192.0.2.1", [], ["192.0.2.1"]),
        ("192.0.2.1", ["192.0.2.1", "192.0.2.2"], ["192.0.2.1", "192.0.2.2"]),
        ("192.0.2.1", ["192.0.2.2", "::2", "::3"], ["192.0.2.1", "::2", "192.0.2.2", "::3"]),
        ("::1", ["192.0.2.2", "::2"], ["::1", "192.0.2.2", "::2"]),
        ("::1", [f"::{n}" for n in range(2, 20)], ["::1", "::2", "::3", "::4", "::5", "::6"]),
    ],
)
def test_order_is_the_agents_choice_then_families_in_turn(first: str, others: list[str], expected: list[str]) -> None:
    assert in_turn(first, others) == expected


def test_silent_address_is_left_for_the_next_after_a_moment() -> None:
    dialled: list[str] = []
    near, far = socket.socketpair()

    def attempt(host: str, port: int) -> socket.socket:
        dialled.append(host)
        return silent() if host == "192.0.2.1" else near

    with near, far:
        made = Race(["192.0.2.1", "192.0.2.2"], 443, dial=attempt, now=0)
        assert made.turn(0) is None
        assert made.turn(race.STAGGER_SECONDS - 0.01) is None
        assert (dialled, made.deadline) == (["192.0.2.1"], race.STAGGER_SECONDS)
        assert made.turn(race.STAGGER_SECONDS) is None
        assert dialled == ["192.0.2.1", "192.0.2.2"]
        assert len(made.fds()) == 2
        assert made.turn(race.STAGGER_SECONDS) is near
        assert made.fds() == []
        made.close()


def test_no_answer_ends_as_timeout() -> None:
    made = Race(["192.0.2.1"], 443, dial=lambda host, port: silent(), now=0)
    assert made.turn(race.CONNECT_SECONDS - 0.1) is None
    with pytest.raises(ConnectionError, match="connect_timeout"):
        made.turn(race.CONNECT_SECONDS)
    assert made.fds() == []
    made.close()
