"""A right to give: it is in no artefact that confines the agent itself, it is proved, and it is told to people."""

from __future__ import annotations

import json

import pytest

from policy import data, errors, prove
from policy.compile.artefacts import Artefacts, canonical
from policy.explain import diff
from policy.grants.effective import Effective
from policy.manifest.agent import Manifest
from policy.rules import items, nine
from tests.unit.policy.compile import sample

SPAWN = "[spawn]\nallowed = true\nmax_depth = 1\nmax_descendants = 2\n"
RIGHTS = (
    'may_grant = [{ host = "api.example.com", ports = [443], protocol = "tls" }, { read = "/srv/given" }, '
    '{ secret = "token" }]\n'
)
# What holds the agent itself.
OWN = ("config.json", "seccomp.json", "seccomp.bpf", "cgroup.json", "mounts.json", "network.json", "firewall.nft")


def _manifest(more: str = RIGHTS) -> Manifest:
    return sample.manifest(more=SPAWN + more)


def _effective(manifest: Manifest) -> Effective:
    return nine.requested(manifest, roles=data.roles())


def test_right_to_give_changes_no_wall() -> None:
    giving, bare = (sample.compiled(_manifest(more), sample.host()) for more in (RIGHTS, ""))
    for name in (*OWN, "gates.json", "credentials.json", "runtime.json"):
        assert giving.files[name] == bare.files[name], name
    assert "may_grant" not in bare.json("supervision.json")["spawn"]


def test_wider_right_in_artefact_is_found() -> None:
    manifest = _manifest()
    made = sample.compiled(manifest, sample.host())
    prove.prove(_effective(manifest), made)
    document = made.json("supervision.json")
    document["spawn"]["may_grant"]["credentials"].append("zz-other")
    wider = Artefacts({**made.files, "supervision.json": canonical(document)})
    with pytest.raises(errors.ProofError, match="may_grant"):
        prove.prove(_effective(manifest), wider)
    del document["spawn"]["may_grant"]["read"]
    with pytest.raises(errors.ArtefactError):
        prove.prove(_effective(manifest), Artefacts({**made.files, "supervision.json": canonical(document)}))


def test_child_with_given_network_is_within() -> None:
    parent = sample.compiled(_manifest(), sample.host())
    table = '[[permissions.network]]\nhost = "api.example.com"\nports = [443]\nprotocol = "tls"\n'
    child = sample.manifest(network="outbound-https-only", more=table)
    ceiling = _effective(_manifest()).for_child(remaining_seconds=60)
    narrowed = ceiling.meet(_effective(child))
    made = sample.compiled(child, sample.host(), ceiling=ceiling)
    assert narrowed.network == _effective(child).network
    prove.within(made, parent, remaining_seconds=60)
    bare = sample.compiled(_manifest(""), sample.host())
    with pytest.raises(errors.ProofError, match="network"):
        prove.within(made, bare, remaining_seconds=60)


def test_diff_and_excess_name_the_right() -> None:
    giving, bare = _effective(_manifest()), _effective(_manifest(""))
    rows = diff.compare(bare, giving).rows
    assert [(row.noun, len(row.added)) for row in rows] == [("right for children", 4)]
    over = items.excess(_manifest(), giving, bare)
    assert [one.grant for one in over] == [f"spawn.may_grant[{index}]" for index in range(3)]
    assert "give to children: connect api.example.com tls 443" in json.dumps([one.lines for one in over])


def test_role_bounds_rights_to_give() -> None:
    ceiling = data.roles().ceiling("observer")
    giving = _effective(_manifest())
    assert not giving.may_grant.is_subset(ceiling.may_grant)
    assert giving.may_grant.meet(ceiling.may_grant).network.mode == "off"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("may_grant = [{}]", "has nothing"),
        ('may_grant = [{ host = "api.example.com" }]', "go together"),
        ('may_grant = [{ read = "/a", secret = "s" }]', "read and secret"),
        ('may_grant = [{ host = "host.covenant", ports = [2000], protocol = "tcp" }]', "cannot be given"),
        ('may_grant = [{ read = "/a" }, { read = "/a" }]', "listed twice"),
    ],
)
def test_right_that_is_none_is_refused(line: str, said: str) -> None:
    with pytest.raises(errors.ManifestError, match=said):
        _manifest(line + "\n")
