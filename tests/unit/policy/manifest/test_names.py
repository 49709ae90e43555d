"""Names of this program's tables: what does not exist is named with its place and what was probably meant."""

from __future__ import annotations

import pytest

from policy import errors
from policy.manifest import names, parse
from policy.manifest.agent import Manifest
from tests import signing_kit

MANIFEST = signing_kit.MANIFEST.decode()
PROFILES = ("node", "python3", "static")
CALLS = frozenset({"openat", "socket", "getrandom"})
ROLES = ("observer", "reader")


def manifest(more: str) -> Manifest:
    return parse.parse((MANIFEST + more).encode())


def refused(more: str) -> errors.ManifestError:
    with pytest.raises(errors.ManifestError) as caught:
        names.check(manifest(more), profiles=PROFILES, syscalls=CALLS)
    return caught.value


def place(more: str, word: str) -> str:
    rows = (MANIFEST + more).split("\n")
    line, column = next((n, row.index(word) + 1) for n, row in enumerate(rows, 1) if word in row)
    return f"agent.toml:{line}:{column}"


def test_known_names_pass() -> None:
    more = '[permissions.syscalls]\nprofile = "node"\nallow = ["openat"]\ndeny = ["socket"]\n'
    names.check(manifest(more), profiles=PROFILES, syscalls=CALLS)
    names.check(manifest(""), profiles=PROFILES, syscalls=CALLS)


def test_profile() -> None:
    more = '[permissions.syscalls]\nprofile = "pyhton3"\n'
    error = refused(more)
    assert type(error) is errors.ManifestError
    assert error.message == "system call profile `pyhton3` is not known"
    assert error.hint == "did you mean `python3`? known: node, python3, static"
    assert error.where == place(more, '"pyhton3"')


def test_system_calls_all_of_them() -> None:
    more = '[permissions.syscalls]\nallow = ["openat", "getrandon"]\ndeny = ["sockte", "nothing_like_it"]\n'
    error = refused(more)
    assert type(error) is errors.UnknownSyscallError
    found = error.to_json()["errors"]
    assert [(f["where"], f["hint"]) for f in found] == [
        (place(more, '"getrandon"'), "did you mean `getrandom`?"),
        (place(more, '"sockte"'), "did you mean `socket`?"),
        (place(more, '"nothing_like_it"'), "names are those of the kernel's tables"),
    ]


def test_profile_and_call_are_one_refusal() -> None:
    error = refused('[permissions.syscalls]\nallow = ["opnat"]\nprofile = "x"\n')
    assert type(error) is errors.ManifestError
    assert [f["message"].split("`")[1] for f in error.to_json()["errors"]] == ["opnat", "x"]


def test_role_may_be_operators_so_it_is_note() -> None:
    assert names.unknown_role(manifest(""), ROLES) == ""
    known = parse.parse(MANIFEST.replace("[agent]\n", '[agent]\nrole = "reader"\n').encode())
    assert names.unknown_role(known, ROLES) == ""
    spelt = parse.parse(MANIFEST.replace("[agent]\n", '[agent]\nrole = "raeder"\n').encode())
    note = names.unknown_role(spelt, ROLES)
    assert note == (
        "role `raeder` is not one of this program's (agent.toml:2:8); did you mean `reader`? known: observer, reader"
    )
    far = parse.parse(MANIFEST.replace("[agent]\n", '[agent]\nrole = "warehouse"\n').encode())
    assert names.unknown_role(far, ROLES).endswith("; known: observer, reader")
