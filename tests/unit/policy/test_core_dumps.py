"""Where the kernel sends core dumps, and which limit stops them."""

from __future__ import annotations

import pytest

from policy import core_dumps

UNLIMITED = 2**64 - 1


@pytest.mark.parametrize(
    ("pattern", "where", "stopping"),
    [
        ("core", "file", {0, 1}),
        ("", "file", {0, 1}),
        ("/var/crash/%e.%p", "file", {0, 1}),
        ("core|x", "file", {0, 1}),
        ("|/usr/lib/systemd/systemd-coredump %P %u", "program", {1}),
        ("|/usr/share/apport/apport -p%p", "program", {1}),
        ("@/run/coredump.socket", "socket", set()),
        ("@@/run/coredump.socket", "socket", set()),
    ],
)
def test_limit_stops_dump_by_its_pattern(pattern: str, where: str, stopping: set[int]) -> None:
    assert core_dumps.destination(pattern) == where
    assert {limit for limit in (0, 1, 2, 4096, UNLIMITED) if core_dumps.stopped(pattern, limit)} == stopping


def test_our_limit_is_never_worse_than_none() -> None:
    for pattern in ("core", "|handler", "@socket"):
        assert core_dumps.stopped(pattern, core_dumps.LIMIT) >= core_dumps.stopped(pattern, 0)
