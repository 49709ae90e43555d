"""The statement: in-toto's form exactly, and a corpus of hostile payloads that a listed key has signed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from policy import errors, package
from policy.signing import statement, strict_json
from tests import signing_kit as kit

PACKAGE = package.Package(kit.FILES)


def _wire() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(kit.statement(PACKAGE).encode())
    return made


def test_what_is_signed_is_in_toto_and_is_read_back() -> None:
    made = kit.statement(PACKAGE, audience="h.example", unknown_sections=("a", "b"), parent_digest="0" * 64)
    wire = json.loads(made.encode())
    assert set(wire) == {"_type", "subject", "predicateType", "predicate"}
    assert wire["_type"] == "https://in-toto.io/Statement/v1"
    assert wire["predicateType"] == statement.PREDICATE_TYPE
    assert [s["name"] for s in wire["subject"]] == sorted(kit.FILES)
    assert statement.parse(made.encode()) == made
    assert dict(made.subjects) == dict(PACKAGE.digests)


def test_bytes_do_not_depend_on_order_of_subjects() -> None:
    turned = dict(reversed(list(PACKAGE.digests.items())))
    assert kit.statement(PACKAGE, subjects=turned).encode() == kit.statement(PACKAGE).encode()


def test_statement_is_frozen() -> None:
    made = kit.statement(PACKAGE)
    with pytest.raises(ValueError, match="frozen"):
        made.serial = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.subjects["x"] = "0" * 64  # type: ignore[index]


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


def _drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return change


SUBJECT = {"name": "x", "digest": {"sha256": "0" * 64}}
HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "type of another version": _set("_type", to="https://in-toto.io/Statement/v0.1"),
    "no type": _drop("_type"),
    "the field's own name instead of the alias": _set("type_", to="https://in-toto.io/Statement/v1"),
    "another predicate": _set("predicateType", to="https://slsa.dev/provenance/v1"),
    "another version of ours": _set("predicateType", to="https://covenant.invalid/agent-package/v2"),
    "unknown key": _set("extra", to=1),
    "unknown key in the predicate": _set("predicate", "admin", to=True),
    "subjects in the predicate": _set("predicate", "subjects", to={"agent.toml": "0" * 64}),
    "no predicate": _drop("predicate"),
    "a list as predicate": _set("predicate", to=[]),
    "no subjects": _set("subject", to=[]),
    "subjects as an object": _set("subject", to={}),
    "a subject twice": lambda d: d["subject"].append(copy.deepcopy(d["subject"][0])),
    "a subject twice with another digest": lambda d: d["subject"].append(
        {**d["subject"][0], "digest": SUBJECT["digest"]}
    ),
    "unknown key in a subject": _set("subject", 0, "uri", to="x"),
    "a second digest": _set("subject", 0, "digest", "sha512", to="0" * 128),
    "another digest": _set("subject", 0, "digest", to={"sha1": "0" * 40}),
    "a short digest": _set("subject", 0, "digest", "sha256", to="0" * 63),
    "an upper-case digest": _set("subject", 0, "digest", "sha256", to="A" * 64),
    "a digest with a newline": _set("subject", 0, "digest", "sha256", to="0" * 64 + "\n"),
    "a name that is a number": _set("subject", 0, "name", to=1),
    "the envelope as subject": _set("subject", 0, "name", to="agent.dsse.json"),
    "an absolute subject": _set("subject", 0, "name", to="/etc/passwd"),
    "a subject above the package": _set("subject", 0, "name", to="../x"),
    "a subject with NUL": _set("subject", 0, "name", to="a\0b"),
    "half a surrogate": _set("subject", 0, "name", to="\ud800"),
    "subjects that differ in case": lambda d: d["subject"].append({**SUBJECT, "name": "MAIN.PY"}),
    "an id with @": _set("predicate", "agent_id", to="a@b"),
    "an id with a newline": _set("predicate", "agent_id", to="hello\n"),
    "an empty id": _set("predicate", "agent_id", to=""),
    "a long id": _set("predicate", "agent_id", to="a" * 129),
    "a serial as text": _set("predicate", "serial", to="1"),
    "a serial as bool": _set("predicate", "serial", to=True),
    "a negative serial": _set("predicate", "serial", to=-1),
    "a huge serial": _set("predicate", "serial", to=2**53),
    "no serial": _drop("predicate", "serial"),
    "no end": _drop("predicate", "expires_at"),
    "null as end": _set("predicate", "expires_at", to=None),
    "an end before the start": _set("predicate", "expires_at", to=1),
    "an end at the start": lambda d: d["predicate"].update(expires_at=d["predicate"]["not_before"]),
    "no audience": _drop("predicate", "audience"),
    "an empty audience": _set("predicate", "audience", to=""),
    "an audience with a space": _set("predicate", "audience", to="a b"),
    "a list of audiences": _set("predicate", "audience", to=["a"]),
    "an approval as a number": _set("predicate", "approve_unlimited", to=1),
    "an approval as text": _set("predicate", "approve_unlimited", to="false"),
    "no approval": _drop("predicate", "approve_unlimited"),
    "unsorted sections": _set("predicate", "unknown_sections", to=["b", "a"]),
    "repeated sections": _set("predicate", "unknown_sections", to=["a", "a"]),
    "sections as text": _set("predicate", "unknown_sections", to="ab"),
    "a parent that is no digest": _set("predicate", "parent_digest", to="abc"),
    "a version as text": _set("predicate", "roles_version", to="1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_payload_is_refused_even_when_signed(name: str) -> None:
    document = _wire()
    payload = strict_json.dumps(document)
    kit.verify(PACKAGE.with_envelope(kit.envelope(payload)))
    HOSTILE[name](document)
    hostile = json.dumps(document).encode()
    with pytest.raises(strict_json.MalformedJsonError):
        statement.parse(hostile)
    with pytest.raises(errors.SignatureError, match="the statement is malformed") as caught:
        kit.verify(PACKAGE.with_envelope(kit.envelope(hostile)))
    assert caught.value.code == "rule_2_signature"


@pytest.mark.parametrize("payload", [b"", b"null", b"[]", b"1", b"{}", b"\xff", b"[" * 100_000])
def test_payload_no_object_is_refused(payload: bytes) -> None:
    with pytest.raises(errors.SignatureError, match="the statement is malformed"):
        kit.verify(PACKAGE.with_envelope(kit.envelope(payload)))


def test_too_many_subjects_are_refused() -> None:
    subjects = {f"f{n}": "0" * 64 for n in range(10_000)}
    made = kit.statement(PACKAGE, subjects=subjects)
    assert len(statement.parse(made.encode()).subjects) == 10_000
    document = json.loads(made.encode())
    document["subject"].append(SUBJECT)
    with pytest.raises(strict_json.MalformedJsonError, match="10000"):
        statement.parse(json.dumps(document).encode())


def test_signer_is_refused_what_no_verifier_would_take() -> None:
    with pytest.raises(errors.SignatureError, match="audience"):
        kit.statement(PACKAGE, audience="a b")
    with pytest.raises(errors.SignatureError, match="expires_at"):
        kit.statement(PACKAGE, expires_at=0)


def test_statement_has_six_mebibytes_at_most() -> None:
    payload = kit.statement(package.Package(kit.FILES)).encode()
    full = payload + b" " * (6 * 1024 * 1024 - len(payload))
    assert statement.parse(full) == statement.parse(payload)
    with pytest.raises(strict_json.MalformedJsonError, match="larger than 6291456 bytes"):
        statement.parse(full + b" ")


def test_units_of_time_and_default_life_of_signature() -> None:
    assert statement.DAY_MS == 86_400_000
    assert statement.DEFAULT_LIFETIME_MS == 7_776_000_000
    assert statement.MAX_TIME_MS == 9_007_199_254_740_991
