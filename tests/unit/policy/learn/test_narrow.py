"""Check a manifest that is narrowed to what a run used: what stays, what goes, and whose words are kept."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from policy import data
from policy.grants.executables import ExecutableSet
from policy.learn import narrow
from policy.learn.ceiling import HostPlace
from policy.learn.propose import LearntProposal, Line
from policy.manifest import parse
from policy.rules import nine

HEAD = """# the author's own words
[agent]
id = "mine"
name = "Mine"
version = "1"
runtime = "command"
entry = "/usr/bin/tool"  # the tool

[resources]
memory_mb = 64
disk_mb = 64
network = "{network}"

[sandbox]
required = true
backend = "linux-gvisor"
filesystem = "host"
"""
FILES = """
[permissions.filesystem]
# what it reads
read = ["/srv/a", "/srv/b"]
write = ["/data", "volume:kept:/kept"]

[permissions.executables]
allow = ["/usr/bin/sh@sha256:{}", "/usr/bin/git", "root"]

[root]
base = "debian-minimal@sha256:{}"
""".format("0f" * 32, "0e" * 32)
NETWORK = """
[[permissions.network]]
host = "a.example.org"  # the first
ports = [443]
protocol = "tls"

[[permissions.network]]
host = "*.wild.example.org"
ports = [443, "8000-8010"]
protocol = "tls"

[[permissions.network]]
host = "asked.example.org"
ports = [443]
protocol = "tls"
on_deny = "ask"

[[permissions.network]]
host = "10.0.0.0/8"
ports = [53]
protocol = "udp"

[[permissions.network]]
host = "plain.example.org"
ports = ["20-30"]
protocol = "tcp"
"""


def line(key: str, value: str) -> Line:
    return Line(key, value, 2, 1_000_000_000, ("tool",))


def narrowed(text: str, found: LearntProposal, links: dict[str, str] | None = None) -> tuple[dict[str, Any], Any]:
    """Narrow a manifest. Returns it as read, and the outcome; it is a manifest, and never wider than before."""
    before = parse.parse(text.encode())
    said = {one: f"seen for {one.value}" for one in found.lines}
    done = narrow.narrowed(text, before, found, links or {}, said)
    after = parse.parse(done.text.encode())
    old, new = (nine.requested(one, roles=data.roles()) for one in (before, after))
    if not before.permissions.executables.trees:
        assert new.is_subset(old)
    assert "# the author's own words" in done.text
    return tomllib.loads(done.text), done


def test_used_files_and_programs_stay_with_their_evidence() -> None:
    found = LearntProposal(
        reads=(line("read", "/srv/a/x.txt"),),
        volumes=(line("write", "/kept"),),
        programs=(line("executables", "/bin/sh"), line("executables", "/usr/bin/wc")),
    )
    links = {"/bin/sh": "/usr/bin/dash", "/usr/bin/sh": "/usr/bin/dash"}
    after, done = narrowed(HEAD.format(network="off") + FILES, found, links)
    permissions = after["permissions"]
    assert permissions["filesystem"] == {"read": ["/srv/a/x.txt"], "write": ["volume:kept:/kept"]}
    assert permissions["executables"]["allow"] == ["/usr/bin/sh@sha256:" + "0f" * 32, "/usr/bin/wc"]
    assert {(one.key, one.value) for one in done.taken_out} == {
        ("permissions.filesystem.read", "/srv/a"),
        ("permissions.filesystem.read", "/srv/b"),
        ("permissions.filesystem.write", "/data"),
        ("permissions.executables.allow", "/usr/bin/git"),
        ("permissions.executables.allow", "root"),
    }
    for words in ("# what it reads", "# the tool", '"/srv/a/x.txt", # seen for /srv/a/x.txt', "# seen for /usr/bin/wc"):
        assert words in done.text


def test_unused_grants_are_taken_out() -> None:
    after, _ = narrowed(HEAD.format(network="full") + FILES + NETWORK, LearntProposal())
    assert after["permissions"]["filesystem"] == {"read": [], "write": []}
    assert after["permissions"]["executables"] == {"allow": []}
    # What no observer counts by name stays.
    assert [one["host"] for one in after["permissions"]["network"]] == ["asked.example.org", "10.0.0.0/8"]
    assert after["resources"]["network"] == "full"


def test_without_reached_host_network_is_off() -> None:
    """An empty list beside a mode would grant every public host."""
    one = NETWORK[: NETWORK.index("[[permissions.network]]", 5)]
    for entries in ("", one):
        after, done = narrowed(HEAD.format(network="outbound-https-only") + entries, LearntProposal())
        assert after["resources"]["network"] == "off"
        assert "network" not in after.get("permissions", {})
        assert [taken.key for taken in done.taken_out] == ["permissions.network"]


def test_destinations_are_those_that_were_reached() -> None:
    hosts = tuple(
        line("network", one)
        for one in (
            "a.example.org:443",
            "one.wild.example.org:443",
            "two.wild.example.org:443",
            "two.wild.example.org:8001",
            "plain.example.org:22",
        )
    )
    after, done = narrowed(HEAD.format(network="full") + NETWORK, LearntProposal(hosts=hosts))
    found = [(one["host"], one["ports"]) for one in after["permissions"]["network"]]
    assert found[0] == ("a.example.org", [443])
    assert sorted(found[1:3]) == [("one.wild.example.org", [443]), ("two.wild.example.org", [443, 8001])]
    assert found[3:] == [("asked.example.org", [443]), ("10.0.0.0/8", [53]), ("plain.example.org", [22])]
    assert done.taken_out == ()
    assert "# seen for a.example.org:443" in done.text


def test_mode_without_list_becomes_list_of_reached_hosts() -> None:
    hosts = (line("network", "a.example.org:443"), line("network", "b.example.org:443"))
    after, _ = narrowed(HEAD.format(network="outbound-https-only"), LearntProposal(hosts=hosts))
    assert [one["host"] for one in after["permissions"]["network"]] == ["a.example.org", "b.example.org"]


def test_programs_of_workspace_stay_where_one_was_started() -> None:
    text = HEAD.format(network="off") + (
        '\n[workspace]\nmode = "overlay"\nfrom = ["/srv"]\nexec = true\nmax_mb = 8\n'
        '\n[permissions.executables]\nallow = ["workspace"]\n'
    )
    after, _ = narrowed(text, LearntProposal(workspace_programs=line("executables", "workspace")))
    assert after["permissions"]["executables"]["allow"] == ["workspace"]
    manifest = parse.parse(text.encode())
    assert narrow.ceiling(manifest, {}, HostPlace("/srv/x", "/work")).programs


@pytest.mark.parametrize(
    "text",
    [
        # Tables in parts and out of order, lists of one line and of many, a list of tables in a row.
        HEAD.format(network="off").replace(
            "[resources]", '[permissions.filesystem]\nread = [\n "/a", # x\n]\n[resources]'
        )
        + '[permissions.executables]\nallow = ["/usr/bin/git"]\n',
        HEAD.format(network="full")
        + '[permissions]\nnetwork = [{ host = "a.example.org", ports = [443], protocol = "tls" }, '
        '{ host = "*.b.example.org", ports = [443], protocol = "tls" }]\nfilesystem = { read = ["/a"] }\n',
        'permissions.filesystem.read = ["/a"]\n' + HEAD.format(network="off"),
    ],
    ids=["out-of-order", "inline", "dotted"],
)
def test_every_layout_of_toml_is_narrowed(text: str) -> None:
    found = LearntProposal(
        reads=(line("read", "/a/1"),),
        hosts=(line("network", "x.b.example.org:443"), line("network", "y.b.example.org:443")),
    )
    after, _ = narrowed(text, found)
    assert after["permissions"]["filesystem"]["read"] == ["/a/1"]
    if "network" in after["permissions"]:
        assert {one["host"] for one in after["permissions"]["network"]} == {"x.b.example.org", "y.b.example.org"}
    assert not after["permissions"].get("executables", {}).get("allow")


def test_programs_are_compared_with_their_trees() -> None:
    """A tree covers the programs that it has, and the whole root each layer, but not the workspace."""
    trees = {"/usr/bin/git": "layer:git", "/usr/bin/nft": "layer:base"}
    layer, root = (ExecutableSet.of([("/usr/bin/wc", None)], [one]) for one in ("layer:git", "root"))
    for allowed, files, above in (
        (True, ["/usr/bin/git", "/usr/bin/wc"], layer),
        (False, ["/usr/bin/nft"], layer),
        (False, ["/usr/bin/unknown"], layer),
        (True, ["/usr/bin/nft", "/usr/bin/unknown"], root),
    ):
        mine = ExecutableSet.of([(one, None) for one in files])
        assert narrow.starts_no_more(mine, above, trees) is allowed, files
    for allowed, tree, above in (
        (False, "root", layer),
        (False, "workspace", root),
        (True, "layer:git", root),
        (True, "layer:git", layer),
    ):
        assert narrow.starts_no_more(ExecutableSet.of([], [tree]), above, trees) is allowed, tree
