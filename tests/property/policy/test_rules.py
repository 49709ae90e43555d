"""The rules over generated grants: nothing that exceeds goes unsaid, and delegation narrows at any depth."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from policy import data, errors
from policy.grants.effective import NO_RIGHTS, Effective
from policy.manifest.agent import Manifest
from policy.manifest.parse import parse
from policy.rules import items, never, nine
from policy.rules.parent import delegate
from tests import rules_kit as kit
from tests.property.policy import grants_strategies as gs

words = ("read", "openat", "socket", "pread64")
MEMORY = st.sampled_from([1, 128, 512, 4096])


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests that the parser accepts, over all ten domains."""
    paths = draw(st.lists(st.sampled_from(["/srv/a", "/srv/a/b", "/srv/ab", "/data"]), unique=True, max_size=3))
    written = draw(st.sampled_from([[], ["/srv/w"], ["/srv/a"]]))
    mode = "host" if written else draw(st.sampled_from(["read-only-package", "ephemeral", "host"]))
    network, table = draw(
        st.sampled_from([
            ("off", ""), ("full", ""), ("outbound-https-only", ""),
            ("full", '[[permissions.network]]\nhost = "*.example.com"\nports = [22, "80-90"]\nprotocol = "tcp"\n'),
            ("full", '[[permissions.network]]\nhost = "10.0.0.0/8"\nports = [443]\nprotocol = "udp"\n'),
        ])
    )  # fmt: skip
    role = draw(st.sampled_from(["", *(f'role = "{r}"\n' for r in data.roles().by_name)]))
    lists = {
        "syscalls": ("allow", draw(st.lists(st.sampled_from(words), unique=True))),
        "executables": ("allow", draw(st.sampled_from([[], ["/usr/bin/cat"], ["/usr/bin/ls"]]))),
        "credentials": ("grants", draw(st.sampled_from([[], ["db"]]))),
        "skills": ("side_effects", draw(st.sampled_from([[], ["read"], ["shell", "read"]]))),
    }
    depth = draw(st.integers(0, 3))
    end = draw(st.sampled_from(["", "ttl_seconds = 60\n", "ttl_seconds = 100000\n", "unlimited = true\n"]))
    text = (
        f'[agent]\nid = "hello"\nname = "hello"\nversion = "1"\nruntime = "python3"\nentry = "main.py"\n{role}'
        f'[resources]\nnetwork = "{network}"\nmemory_mb = {draw(MEMORY)}\ndisk_mb = {draw(MEMORY)}\n'
        f'[sandbox]\nrequired = true\nbackend = "linux-gvisor"\nfilesystem = "{mode}"\n'
        f"[permissions.filesystem]\nread = {paths}\nwrite = {written}\n"
        + "".join(f"[permissions.{name}]\n{key} = {values}\n" for name, (key, values) in lists.items())
        + (f"[spawn]\nallowed = true\nmax_depth = {depth}\nmax_descendants = 2\n" if depth else "")
        + (f"[lifetime]\n{end}" if end else "")
        + table
    ).replace("'", '"')
    return parse(text.encode())


def asked(manifest: Manifest) -> Effective:
    return nine.requested(manifest, roles=data.roles())


@given(manifests(), st.one_of(manifests().map(asked), gs.effectives))
def test_whatever_exceeds_is_named_with_key_and_line(manifest: Manifest, ceiling: Effective) -> None:
    wanted = asked(manifest)
    over = items.excess(manifest, wanted, ceiling)
    assert (not over) == wanted.is_subset(ceiling)
    assert {one.domain for one in over} == set(wanted.difference(ceiling))
    for one in over:
        assert one.lines
        assert one.grant.partition(".")[0] in {"agent", "resources", "sandbox", "permissions", "spawn", "lifetime"}
        assert manifest.where(one.grant).startswith("agent.toml")


@given(manifests())
def test_items_of_manifest_lie_within_what_it_asks_for(manifest: Manifest) -> None:
    wanted = asked(manifest)
    assert items.excess(manifest, wanted, wanted) == ()
    for domain, mine in wanted.domains():
        for _, item in items.of_domain(domain, manifest, wanted):
            assert item.is_subset(mine)


@given(manifests())
def test_role_three_is_order_and_nothing_else(manifest: Manifest) -> None:
    role = manifest.agent.role
    made = dataclasses.replace(_CASE, manifest=manifest, requested=asked(manifest))
    within = role is None or made.requested.is_subset(data.roles().ceiling(role))
    refused = kit.refusals(made)
    assert (3 in refused) == (not within)
    assert not isinstance(refused.get(3), errors.ManifestError)


_CASE = kit.case()


@settings(max_examples=50)
@given(gs.effectives, st.lists(gs.effectives, min_size=1, max_size=6))
def test_delegation_never_widens_at_any_depth(root: Effective, children: list[Effective]) -> None:
    above, seconds = root, 600
    for child in children:
        above = dataclasses.replace(above, lifetime=structs.replace(above.lifetime, ttl_seconds=seconds))
        parent = kit.parent(effective=above, remaining_seconds=seconds)
        outcome = delegate(parent, child)
        assert outcome.granted.is_subset(parent.ceiling)
        assert outcome.granted.is_subset(child)
        # What the agent may give lies in its children's ceiling, and nothing else does that it has not itself.
        assert outcome.granted.is_subset(above.for_child(remaining_seconds=seconds))
        if not above.may_grant:
            assert dataclasses.replace(outcome.granted, may_grant=NO_RIGHTS).is_subset(above)
        assert (not outcome.removed) == (outcome.granted == child)
        assert set(outcome.removed) <= set(outcome.report())
        depth = above.spawning.max_depth
        if depth is not None:
            assert (outcome.granted.spawning.max_depth or 0) <= max(depth - 1, 0)
        above, seconds = outcome.granted, seconds - 1


@given(gs.paths, gs.path_lists)
def test_never_is_inside_or_containing_by_component(path: str, trees: list[str]) -> None:
    found = never.find(path, dict.fromkeys(trees, "reason"))

    def parts(of: str) -> list[str]:
        return [p for p in of.split("/") if p]

    def related(tree: str) -> bool:
        mine, theirs = parts(path), parts(tree)
        if not theirs:
            return not mine
        short = min(len(mine), len(theirs))
        return mine[:short] == theirs[:short]

    assert (found is not None) == any(map(related, trees))
    if found is not None:
        assert related(found)
