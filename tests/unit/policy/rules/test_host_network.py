"""Grants that need the host's network, where the supervisor has none; each beside what the operator made up."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy import data
from policy.host import HostFacts
from policy.rules import host_network, nine
from tests import rules_kit as kit

HOST = structs.replace(
    kit.HOST,
    providers=("near", "pretended"),
    searchers=("finds", "pretended"),
    made_up_providers=("pretended",),
    made_up_pages=("made.example.com",),
)
MODELS = '[services.models]\nallow = [{{ provider = "{}", models = ["*"] }}]\n'
NEEDING = {
    "models": (MODELS.format("near"), "services.models.allow", "provider `near` is reached by"),
    "search": ('[services.search]\nallow = ["pretended", "finds"]\n', "services.search.allow", "provider `finds` is"),
    "fetch": ('[services.fetch]\nhosts = ["*.example.org"]\n', "services.fetch.hosts", "pages of `*.example.org` are"),
    "page beside a mock": (
        '[services.fetch]\nhosts = ["made.example.com", "wiki.example.org"]\n',
        "services.fetch.hosts",
        "pages of `wiki.example.org` are fetched by",
    ),
    "mock in a pattern": (
        '[services.fetch]\nhosts = ["*.example.com"]\n',
        "services.fetch.hosts",
        "pages of `*.example.com` are fetched by",
    ),
    "agents": ('[services.agents]\nallow = ["other"]\n', "services.agents.allow", "agents are asked by"),
    "telemetry": ('[services.telemetry]\nsignals = ["logs"]\n', "services.telemetry.signals", "the collector of"),
    "publish": ('[[publish]]\nport = 80\nto = "127.0.0.1:8080"\n', "publish", "publishing at 127.0.0.1:8080 needs"),
    "mock beside it": (
        MODELS.format('near", models = ["a"] }, { provider = "pretended'),
        "services.models.allow",
        "provider `near` is reached by",
    ),
}
NOTHING_NEEDED = {
    "no service": "",
    "mock": MODELS.format("pretended"),
    "made up pages": '[services.fetch]\nhosts = ["made.example.com"]\n',
    "socket": '[[publish]]\nport = 80\nto = "unix:/srv/web.sock"\n',
    # Another refusal names a provider that is not configured (enforceable.py).
    "unknown provider": MODELS.format("missing"),
}


def _refusals(more: str, host: HostFacts = HOST) -> list[tuple[str, str, str]]:
    manifest = kit.manifest(more="\n" + more)
    effective = nine.requested(manifest, roles=data.roles())
    found = host_network.refusals(effective, host, where=manifest.where)
    return [(one.details["grant"], one.message, one.hint) for one in found]


@pytest.mark.parametrize("name", NEEDING)
def test_grant_that_needs_it_is_refused(name: str) -> None:
    more, grant, says = NEEDING[name]
    [(refused, message, hint)] = _refusals(more)
    assert (refused, message.startswith(says)) == (grant, True), message
    assert message.endswith("the host's network, and the supervisor is not in it")
    assert "in config.toml and reload the supervisor" in hint


@pytest.mark.parametrize("name", NOTHING_NEEDED)
def test_grant_that_needs_none_is_not(name: str) -> None:
    assert _refusals(NOTHING_NEEDED[name]) == []


def test_all_that_need_it_are_named() -> None:
    assert len(_refusals(NEEDING["models"][0] + NEEDING["agents"][0])) == 2
    hosts = '[services.fetch]\nhosts = ["wiki.example.org", "made.example.com", "docs.example.org"]\n'
    assert [message.split("`")[1] for _, message, _ in _refusals(hosts)] == ["docs.example.org", "wiki.example.org"]


def test_host_that_becomes_a_mock_needs_none() -> None:
    hosts = NEEDING["page beside a mock"][0]
    made_up = structs.replace(HOST, made_up_pages=("made.example.com", "wiki.example.org"))
    assert (len(_refusals(hosts)), _refusals(hosts, made_up)) == (1, [])
