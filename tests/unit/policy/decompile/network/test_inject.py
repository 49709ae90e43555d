"""Injected secrets read back: exactly the rules that were granted, and a spoiled artefact is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policy import errors
from policy.decompile import read as reading
from policy.denials import Denial
from policy.explain import diff
from policy.why import denied, sight
from tests.unit.policy.compile import sample

ENTRY = """
[[permissions.network]]
host = "api.example.com"
ports = [443]
protocol = "tls"
inject = {{ secret = "github", methods = {methods}, paths = ["/repos/*", "/user"], env = "TOKEN" }}
"""
Files = dict[str, bytes]


def written(methods: str = '["GET"]') -> str:
    return ENTRY.format(methods=methods)


def compiled(more: str | None = None) -> Files:
    made = sample.compiled(sample.manifest(more=written() if more is None else more, network="full"))
    return dict(made.files)


def test_rules_are_read_back() -> None:
    found = reading.read(compiled())
    assert [(one.host, one.secret, one.method, one.path) for one in found.grants.inject.rules] == [
        ("api.example.com", "github", "GET", "/repos/*"),
        ("api.example.com", "github", "GET", "/user"),
    ]
    assert "TOKEN=covenant-placeholder" in found.process.env
    assert "SSL_CERT_FILE=/run/covenant/ca.pem" in found.process.env


def test_without_injection_nothing_is_trusted() -> None:
    found = reading.read(compiled(""))
    assert not found.grants.inject
    assert not any("ca.pem" in one for one in found.process.env)


SPOILED: dict[str, Callable[[Files], None]] = {}


def spoils(name: str, old: bytes, new: bytes) -> None:
    def spoil(files: Files) -> None:
        assert files["gates.json"].count(old) >= 1, old
        files["gates.json"] = files["gates.json"].replace(old, new, 1)

    SPOILED[name] = spoil


spoils("two secrets of a host", b'"secret":"github"', b'"secret":"a"')
spoils("every request", b'"path":"/repos/*"', b'"path":"/*"')
spoils("no rule", b'"rules":[', b'"rules":[],"more":[')
spoils("an unknown key", b'"method":"GET"', b'"also":1,"method":"GET"')
spoils("a missing key", b',"user":""', b"")
spoils("a key of another type", b'"user":""', b'"user":0')
spoils("every host", b'"host":"api.example.com"', b'"host":"*"')


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_artefact_is_refused(name: str) -> None:
    files = compiled()
    SPOILED[name](files)
    with pytest.raises(errors.ArtefactError):
        reading.read(files)


@pytest.mark.parametrize(
    ("before", "after", "widens"),
    [
        ("", written(), True),
        (written(), written('["GET", "POST"]'), True),
        (written('["*"]'), written(), False),
        (written(), written().replace("/user", "/u*"), True),
        (written(), written().replace("github", "other"), True),
    ],
)
def test_more_requests_with_a_secret_are_wider(before: str, after: str, *, widens: bool) -> None:
    plain = '[[permissions.network]]\nhost = "api.example.com"\nports = [443]\nprotocol = "tls"\n'
    old, new = (reading.read(compiled(one or plain)).grants for one in (before, after))
    found = diff.compare(old, new)
    assert found.widens is widens
    assert {row.noun for row in found.rows} == {"injected secret"}


def test_denied_request_has_its_lines() -> None:
    manifest = sample.manifest(more=written(), network="full")
    seen = sight.of(sample.compiled(manifest), manifest, files=("main.py",), host=sample.host(), never={})
    one = Denial("inject", "POST https://api.example.com/admin: POST /admin is not granted", "request_not_granted")
    found = denied.explain(one, seen)
    assert found.note == 'add to inject of the entry for api.example.com: methods = ["POST"], paths = ["/admin"]'
    assert denied.explain(Denial("inject", "x", "path_refused"), seen).note == "no line of agent.toml allows it"
