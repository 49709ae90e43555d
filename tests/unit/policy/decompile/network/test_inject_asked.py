"""Requests with a secret that an operator is asked about: within role and parent, written, read back, and explained."""

from __future__ import annotations

import pytest

from policy import errors
from policy.decompile import read as reading
from policy.denials import NOT_APPROVED, Denial
from policy.explain import diff
from policy.grants.credentials import EVERY, InjectRule, InjectSet
from policy.leases import exported, targets
from policy.why import denied, sight
from tests.unit.policy.compile import sample

ENTRY = """
[[permissions.network]]
host = "api.example.com"
ports = [443]
protocol = "tls"
inject = {{ secret = "github", methods = ["GET"], paths = ["/user"]{more} }}
"""
ASKED = ENTRY.format(more=', on_deny = "ask", ask_seconds = 20')
OTHERS = InjectRule("api.example.com", "github", "Authorization", "{}", "", "*", "/*")
USER = OTHERS._replace(method="GET", path="/user")


def grants(more: str) -> InjectSet:
    made = sample.compiled(sample.manifest(more=more, network="full"))
    return reading.read(dict(made.files)).grants.inject


def test_questions_are_read_back() -> None:
    assert grants(ASKED) == InjectSet((USER,), (OTHERS,))
    assert grants(ENTRY.format(more="")) == InjectSet((USER,))


def test_question_covers_no_grant() -> None:
    asks, grants_all = InjectSet.of((), (OTHERS,)), InjectSet.of((OTHERS,))
    assert asks.is_subset(grants_all)
    assert not grants_all.is_subset(asks)
    assert grants_all.meet(asks) == asks
    assert InjectSet.of((EVERY,)).meet(asks) == asks
    narrow = InjectSet.of((USER,))
    assert asks.meet(narrow) == InjectSet.of((), (USER,))
    assert asks.difference(narrow) == asks
    assert InjectSet.of((OTHERS,), (USER,)) == grants_all


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"asked":[{', b'"asked":[],"more":[{'),
        (b'"asked":[{"format":"{}"', b'"asked":[{"format":"x{}"'),
        (b'"method":"*"', b'"method":"GET"'),
        (b'"asked"', b'"also"'),
    ],
)
def test_spoiled_questions_are_refused(old: bytes, new: bytes) -> None:
    files = dict(sample.compiled(sample.manifest(more=ASKED, network="full")).files)
    assert old in files["gates.json"], files["gates.json"]
    files["gates.json"] = files["gates.json"].replace(old, new, 1)
    if new == b'"method":"GET"':
        files["gates.json"] = files["gates.json"].replace(b'"path":"/*"', b'"path":"/user"')
    with pytest.raises(errors.ArtefactError):
        reading.read(files)


def test_question_is_wider_than_none() -> None:
    before, after = (
        reading.read(dict(sample.compiled(sample.manifest(more=one, network="full")).files)).grants
        for one in (ENTRY.format(more=""), ASKED)
    )
    found = diff.compare(before, after)
    assert found.widens
    assert {row.noun for row in found.rows} == {"request that is asked about"}
    assert not diff.compare(after, before).widens


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (", ask_seconds = 5", "without a question"),
        (', on_deny = "ask", ask_seconds = 111', "out of range"),
        (', on_deny = "maybe"', "maybe"),
    ],
)
def test_question_that_is_none_is_refused(more: str, said: str) -> None:
    with pytest.raises(errors.ManifestError, match=said):
        sample.manifest(more=ENTRY.format(more=more), network="full")


def test_denied_question_has_its_lines() -> None:
    manifest = sample.manifest(more=ASKED, network="full")
    seen = sight.of(sample.compiled(manifest), manifest, files=("main.py",), host=sample.host(), never={})
    found = denied.explain(Denial("inject", "POST https://api.example.com/a: none granted it", NOT_APPROVED), seen)
    assert found.note == 'add to inject of the entry for api.example.com: methods = ["POST"], paths = ["/a"]'
    assert "operator" in found.meaning


def test_lease_has_its_lines() -> None:
    head = targets.request("POST", "api.example.com", "/a")
    assert targets.requested(targets.call(head, "a" * 64)) == ("POST", "api.example.com", "/a")
    assert targets.covering("inject", targets.call(head, "a" * 64)) == (f"{head} sha256:{'a' * 64}", head)
    assert targets.request("POST", "a b", "/a") == ""
    assert targets.requested("api.example.com") is None
    assert exported.request("POST", "api.example.com", "/a")[1:] == ('methods = ["POST"]', 'paths = ["/a"]')
    for odd in ("/a*", "/a%20b"):
        (line,) = exported.request("POST", "api.example.com", odd)
        assert line.startswith("# no path of a manifest")
