"""The lines about its denials that an agent reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policy import errors
from policy.denials import Denial, Row
from policy.explain import own_denials
from policy.explain.own_denials import END, OwnDenials
from policy.why import sight
from policy.why.ask import Sight
from tests.unit.policy.compile import sample


def seen() -> Sight:
    manifest = sample.manifest(more='[permissions.credentials]\ngrants = ["db"]\n')
    return sight.of(sample.compiled(manifest), manifest, files=(), host=sample.host(), never={})


def line(denial: Denial, count: int = 1) -> Any:
    return json.loads(OwnDenials(seen).line(Row(denial, count), at_ms=7))


def test_line_names_meaning_and_what_would_allow_it() -> None:
    denial = Denial("syscall", "sync", "not_granted")
    assert line(denial, 3) == {
        "id": denial.id,
        "layer": "syscall",
        "target": "sync",
        "code": "not_granted",
        "grant": "permissions.syscalls",
        "meaning": "the filter answered EPERM, as to every call that is not granted",
        "add": ["[permissions.syscalls]", 'allow = ["sync"]'],
        "never": None,
        "bounds": {},
        "note": None,
        "count": 3,
        "at_ms": 7,
    }


def test_line_says_what_is_never_granted() -> None:
    found = line(Denial("syscall", "ptrace", "not_granted"))
    assert found["add"] == []
    assert found["never"]


@pytest.mark.parametrize("code", ["absent", "token", "expired", "revoked", "unavailable", "malformed", "rate"])
def test_refused_secret_has_one_answer(code: str) -> None:
    """As at the broker: the file does not say whether the vault has a secret."""
    found = line(Denial("credential", "db", code))
    assert found == line(Denial("credential", "db", "absent"))
    assert (found["code"], "id" in found, "grant" in found) == ("refused", False, False)


def test_secret_without_grant_names_its_line() -> None:
    found = line(Denial("credential", "mail", "not_granted"))
    assert found["add"] == ["[permissions.credentials]", 'grants = ["mail"]']


@pytest.mark.parametrize("code", ["rebinding", "upstream"])
def test_names_of_operators_network_are_not_told(code: str) -> None:
    found = line(Denial("dns", "intranet.example.com", code))
    assert (found["code"], "id" in found) == ("refused", False)


def test_file_is_bounded_and_says_so_once() -> None:
    told = OwnDenials(seen)
    lines = [told.line(Row(Denial("syscall", f"{n:04}" + "x" * 1000, "not_granted"), 1), at_ms=n) for n in range(1000)]
    whole = b"".join(lines)
    assert len(whole) <= own_denials.MAX_BYTES
    written = [one for one in lines if one]
    assert written[-1] == END
    assert END not in written[:-1]
    assert all(isinstance(json.loads(one), dict) for one in written)


def test_sight_may_fail() -> None:
    asked = []

    def failing() -> Sight:
        asked.append(1)
        raise errors.ArtefactError("nothing to read")

    told = OwnDenials(failing)
    found = json.loads(told.line(Row(Denial("syscall", "sync", "not_granted"), 1), at_ms=1))
    assert (found["add"], found["grant"]) == ([], "permissions.syscalls")
    assert asked == [1]


def test_sight_is_asked_for_once() -> None:
    asked = []

    def counted() -> Sight:
        asked.append(1)
        return seen()

    told = OwnDenials(counted)
    for name in ("sync", "getcpu"):
        row = Row(Denial("syscall", name, "not_granted"), 1)
        assert json.loads(told.line(row, at_ms=1))["add"]
    assert asked == [1]
