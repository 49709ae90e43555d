"""A denial's id, what is written of a flood, and which grant would have allowed it."""

from __future__ import annotations

import itertools

import pytest

from policy import denials
from policy.denials import MAX_ROWS, SUMMARY_MS, Bounds, Denial, Row

NAME = Denial("dns", "api.example.com", "name_not_granted")
PORT = Denial("packet", "203.0.113.5:443/tcp", "not_granted")


def many(count: int, layer: str = "packet") -> list[Denial]:
    return [Denial(layer, f"203.0.113.5:{port}/tcp", "not_granted") for port in range(1, count + 1)]


def test_id_is_stable_and_over_every_word() -> None:
    # Written down in logs and tickets: another spelling of the digest would rename every refusal there is.
    assert NAME.id == "d-623f03b3603b"
    assert denials.is_id(NAME.id)
    words = ("dns", "a", "b", "ab", "")
    found = {Denial(*triple).id for triple in itertools.product(words, repeat=3)}
    assert len(found) == len(words) ** 3


@pytest.mark.parametrize("text", ["", "d-", "d-4f99c1f5d0c", "d-4f99c1f5d0c9\n", "D-4f99c1f5d0c9", "x-4f99c1f5d0c9"])
def test_what_is_no_id(text: str) -> None:
    assert not denials.is_id(text)


@pytest.mark.parametrize(
    ("denial", "grant"),
    [
        (NAME, "permissions.network"),
        (PORT, "permissions.network"),
        (Denial("sni", "api.example.com:443/tls", "sni_not_granted"), "permissions.network"),
        (Denial("sni", "203.0.113.5:443/tls", "ech_present"), None),
        (Denial("dns", "api.example.com", "rebinding"), None),
        (Denial("memory", "memory_mb", "out_of_memory"), "resources.memory_mb"),
        (Denial("time", "cpu_ms_per_task", "deadline"), "resources.cpu_ms_per_task"),
        (Denial("time", "ttl_seconds", "deadline"), "lifetime.ttl_seconds"),
        (Denial("time", "timeout", "deadline"), None),
        (Denial("packet", "203.0.113.5/icmp", "protocol"), None),
    ],
)
def test_grant_that_would_have_allowed_it(denial: Denial, grant: str | None) -> None:
    assert denial.grant == grant


def test_first_is_written_at_once_and_repeats_once_second() -> None:
    bounds = Bounds()
    assert bounds.told(NAME, now_ms=0) == [Row(NAME, 1)]
    assert [bounds.told(NAME, now_ms=ms) for ms in range(1, 500)] == [[]] * 499
    assert bounds.told(PORT, now_ms=500) == [Row(PORT, 1)]
    assert bounds.due(now_ms=SUMMARY_MS - 1) == []
    assert bounds.due(now_ms=SUMMARY_MS) == [Row(NAME, 499)]
    assert bounds.due(now_ms=SUMMARY_MS) == []
    assert bounds.told(NAME, now_ms=SUMMARY_MS + 1) == []
    assert bounds.due(now_ms=2 * SUMMARY_MS - 1) == []
    assert bounds.wind_up() == [Row(NAME, 1)]
    assert bounds.wind_up() == []


def test_another_code_is_another_denial() -> None:
    bounds = Bounds()
    other = Denial("dns", NAME.target, "rate")
    assert bounds.told(NAME, now_ms=0) + bounds.told(other, now_ms=0) == [Row(NAME, 1), Row(other, 1)]


def test_run_has_at_most_so_many_rows_and_then_number() -> None:
    bounds = Bounds()
    first = [row for denial in many(3000) for row in bounds.told(denial, now_ms=0)]
    assert len(first) < MAX_ROWS
    for denial in many(10, layer="sni"):
        assert bounds.told(denial, now_ms=0, count=7) == []
    last = bounds.wind_up()
    assert {(row.denial.layer, row.denial.target, row.denial.code): row.count for row in last} == {
        ("packet", "", "not_listed"): 3000 - len(first),
        ("sni", "", "not_listed"): 70,
    }
    assert bounds.rows <= MAX_ROWS


def test_flood_at_one_place_leaves_rows_for_others() -> None:
    bounds = Bounds()
    rows = bounds.told(NAME, now_ms=0)
    for second in range(1, 2000):
        bounds.told(NAME, now_ms=second * SUMMARY_MS)
        rows += bounds.due(now_ms=second * SUMMARY_MS)
    assert len(rows) == 1 + denials.MAX_SUMMARIES
    assert bounds.told(PORT, now_ms=0) == [Row(PORT, 1)]
    rows += bounds.wind_up()
    assert sum(row.count for row in rows) == 2000


def test_what_reports_it_may_be_in_agents_hands() -> None:
    assert denials.checked(Denial("kernel", "x", "not_granted")) == Denial("unknown", "x", "not_granted")
    assert denials.checked(Denial("dns", "x", "Not Granted\n")) == Denial("dns", "x", "unknown")
    one, other = (denials.checked(Denial("dns", "a" * 5000 + end, "rate")) for end in "xy")
    assert one != other
    assert len(one.target) < 1100
    assert denials.checked(NAME) == NAME
