"""Internal names: an answer may hold a private address that the manifest grants beside the name, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel import gated_names, three_namespaces
from tests.kernel.gated_names import Gated
from tests.kernel.gated_zone import PUBLIC
from tests.kernel.scripted_resolver import Resolver
from tests.unit.policy.compile import sample

ENTRIES = (
    ("db.corp.example", "[5432]", "tcp"),
    ("*.web.example", "[443]", "tls"),
    ("10.201.0.0/24", "[5432]", "tcp"),
    ("10.9.0.0/16", "[443]", "tcp"),
    ("10.8.0.0/16", "[53]", "udp"),
)
WORLD = "10.201.0.2"
ZONE = {
    ("db.corp.example", "A"): [WORLD, "10.9.0.1", "10.7.0.1", PUBLIC],
    ("db.corp.example", "AAAA"): ["fd00::1"],
    ("in.web.example", "A"): ["10.9.0.1"],
    ("other.web.example", "A"): [WORLD],
    ("metadata.web.example", "A"): ["169.254.169.254"],
    ("udp.web.example", "A"): ["10.8.0.1"],
    ("alias.web.example", "CNAME"): ["db.corp.example."],
}


@pytest.fixture(scope="module")
def gated() -> Iterator[Gated]:
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))
    with three_namespaces.made() as spaces:
        gated_names.links(spaces)
        with gated_names.opened(spaces, artefacts, Resolver(dict(ZONE))) as made:
            yield made
            assert made.error is None


def test_private_address_needs_its_own_entry_on_a_common_port(gated: Gated) -> None:
    gated.forget()
    assert set(gated.texts("db.corp.example")) == {WORLD, PUBLIC}
    # What another entry grants on another port, and what no entry grants, is left out and told.
    assert gated.codes() == {("db.corp.example", "rebinding")}
    assert gated.texts("in.web.example") == ["10.9.0.1"]
    # An alias leads where the name that was asked may lead.
    assert set(gated.texts("alias.web.example")) == {"10.9.0.1", PUBLIC}
    assert ("alias.web.example", "rebinding") in gated.codes()
    for name in ("other.web.example", "metadata.web.example", "udp.web.example"):
        gated.forget()
        assert gated.texts(name) == ["NOERROR"], name
        assert gated.codes() == {(name, "rebinding")}
    assert gated.texts("db.corp.example", "AAAA") == ["NOERROR"]


def test_name_adds_no_reach_to_private_address(gated: Gated) -> None:
    """The entry of the address decides; the sets of the name hold public addresses alone."""
    gated.texts("db.corp.example")
    assert set(gated.elements("db.corp.example")) == {PUBLIC}
    with gated.spaces.listen("world", "0.0.0.0", 5432), gated.spaces.listen("world", "0.0.0.0", 443):
        assert gated.connect(WORLD, 5432) == "connected"
        assert gated.connect(WORLD, 443) == "ECONNREFUSED"
