"""Names that an operator is asked about, beside names that are granted."""

from __future__ import annotations

import pytest

from policy import errors
from policy.grants.network import Network
from policy.grants.sets.access import Protocol
from policy.manifest import parse

HTTPS = ((443, 443),)
Line = tuple[str, tuple[tuple[int, int], ...], Protocol]
API: Line
EVERY: Line
API, EVERY = ("api.example.com", HTTPS, "tls"), ("*.example.com", HTTPS, "tls")


def test_asked_name_is_granted_by_nothing() -> None:
    found = Network.of([API], [EVERY])
    assert found.to_name("api.example.com").allows("tls", 443)
    assert not found.to_asked("api.example.com")
    assert not found.to_name("www.example.com")
    assert found.to_asked("www.example.com").allows("tls", 443)
    assert found.mode == "outbound-https-only"
    assert found.describe() == (
        "connect api.example.com tls 443",
        "connect *.example.com tls 443 once an operator grants it",
    )


def test_question_is_within_question_and_grant() -> None:
    asks, grants = Network.of([], [API]), Network.of([API])
    assert asks.is_subset(Network.of([], [EVERY]))
    assert asks.is_subset(Network.of([EVERY]))
    assert not grants.is_subset(Network.of([], [EVERY]))
    assert grants.difference(asks) == grants
    assert asks.difference(grants) == Network.bottom()


def test_meet_of_grant_and_question_asks() -> None:
    met = Network.of([API]).meet(Network.of([], [EVERY]))
    assert (met.names, met) == ((), Network.of([], [API]))


MANIFEST = """\
[agent]
id = "hello"
name = "hello"
version = "1.0.0"
runtime = "python3"
entry = "main.py"
[resources]
network = "full"
[sandbox]
required = true
backend = "linux-gvisor"
filesystem = "read-only-package"
"""
ENTRY = '[[permissions.network]]\nhost = "{}"\nports = [443]\nprotocol = "{}"\n{}\n'


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (ENTRY.format("8.8.8.8", "tls", 'on_deny = "ask"'), "cannot be held"),
        (ENTRY.format("a.example.com", "tcp", 'on_deny = "ask"'), "cannot be held"),
        (ENTRY.format("a.example.com", "tls", "ask_seconds = 5"), "without a question"),
        (ENTRY.format("a.example.com", "tls", 'on_deny = "ask"\nask_seconds = 111'), "out of range"),
        (ENTRY.format("a.example.com", "tls", 'on_deny = "maybe"'), "maybe"),
        (
            ENTRY.format("a.example.com", "tls", 'on_deny = "ask"') + ENTRY.format("a.example.com", "tls", ""),
            "asked about by another",
        ),
        (
            ENTRY.format(
                "a.example.com", "tls", 'on_deny = "ask"\ninject = { secret = "s", methods = ["GET"], paths = ["/*"] }'
            ),
            "has a secret",
        ),
    ],
)
def test_question_that_cannot_be_held_is_refused(entries: str, said: str) -> None:
    with pytest.raises(errors.ManifestError, match=said):
        parse.parse((MANIFEST + entries).encode())
    fixed = ENTRY.format("a.example.com", "tls", 'on_deny = "ask"')
    assert parse.parse((MANIFEST + fixed).encode()).permissions.network[0].asked
