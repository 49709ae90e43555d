"""Check demands that linux-gvisor or this host cannot enforce yet, each beside the same manifest without it."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy import errors
from policy.grants.resources import UNITS
from policy.host import CgroupFacts, GrantedPath, HostFacts, NetworkFacts
from policy.manifest.parse import parse
from policy.rules import enforceable
from tests import rules_kit as kit

SIZES = ("disk_mb = 16", "disk_mb = 16\n{0}")
IO = ("io_read_bps", "io_write_bps", "io_read_iops", "io_write_iops")


def limit(line: str) -> str:
    return kit.text((SIZES[0], SIZES[1].format(line)))


IO_HOST = structs.replace(kit.HOST, cgroup=CgroupFacts(2, frozenset({"cpu", "io", "memory", "pids"})))
HERMES = """\
[agent]
id = "hello"
name = "h"
version = "1"
runtime = "hermes"
[resources]
network = "off"
"""
NOT_YET = {
    "runtime": (HERMES, "agent.runtime", "runtime"),
}


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_built_is_refused_with_its_place_and_mend(name: str) -> None:
    document, key, start = NOT_YET[name]
    with pytest.raises(errors.NotYetEnforceableError) as caught:
        enforceable.check(parse(document.encode()), kit.HOST)
    assert caught.value.details["grant"] == key
    assert caught.value.where == kit.line_of(document, start)
    assert caught.value.hint
    assert str(caught.value).partition(" cannot be enforced yet: ")[2]
    assert [f.details["grant"] for f in enforceable.findings(parse(document.encode()), IO_HOST)] == [key]


def test_base_manifest_is_enforceable() -> None:
    """The positive control of every case here."""
    enforceable.check(kit.manifest(), kit.HOST)
    enforceable.check(kit.manifest(more="\n[lifetime]\nttl_seconds = 9\n"), kit.HOST)
    enforceable.check(kit.manifest(more="\n[permissions.skills]\nallow = []\n[spawn]\nallowed = false\n"), kit.HOST)


WRITES = kit.text(('filesystem = "read-only-package"', 'filesystem = "host"'), ('read = ["/srv', 'write = ["/srv'))
URI = "matrix://tool/mcp/fs/read@1.0"
TOOL = kit.text(more=f'\n[permissions.skills]\nallow = ["{URI}"]\n')
TOOLS = frozenset({URI})
LINK = NetworkFacts(lacks="", mend="")
ROOM = {path: GrantedPath(path, "dir", 8) for path in ("/srv/docs", "/srv/data")}
UNABLE: dict[str, tuple[str, dict[str, object], str, dict[str, object]]] = {
    "runsc": (kit.MANIFEST, {"runsc": None}, "sandbox.backend", {}),
    "runtime": (kit.MANIFEST, {"runtimes": {}}, "agent.runtime", {}),
    "tool": (TOOL, {"network": LINK}, "permissions.skills.allow[0]", {"network": LINK, "tools": TOOLS}),
    "link to tools": (TOOL, {"tools": TOOLS}, "permissions.skills.allow", {"network": LINK, "tools": TOOLS}),
    "standby": (
        kit.text(('filesystem = "read-only-package"', 'filesystem = "read-only-package"\nstandby = 1')),
        {"cgroup": CgroupFacts(1, frozenset({"cpu", "memory", "pids"}))}, "sandbox.standby",
        {"cgroup": CgroupFacts(1, frozenset({"cpu", "freezer", "memory", "pids"}))},
    ),
    "suspend": (
        kit.text(more='\n[lifetime]\nttl_seconds = 9\non_expiry = "suspend"\n'),
        {"cgroup": CgroupFacts(1, frozenset({"cpu", "memory", "pids"}))}, "lifetime.on_expiry",
        {"cgroup": CgroupFacts(1, frozenset({"cpu", "freezer", "memory", "pids"}))},
    ),
    "no-cgroups": (kit.MANIFEST, {"cgroup": CgroupFacts(0, frozenset())}, "resources", {}),
    "no-pids": (kit.MANIFEST, {"cgroup": CgroupFacts(1, frozenset({"cpu", "memory"}))}, "resources", {}),
    "swap": (
        limit("swap_mb = 64"), {}, "resources.swap_mb",
        {"cgroup": CgroupFacts(2, frozenset({"cpu", "memory", "pids"}), swap_accounting=True)},
    ),
    "cpu-time": (
        limit("cpu_time_ms = 1000"), {"cgroup": CgroupFacts(1, frozenset({"cpu", "memory", "pids"}))},
        "resources.cpu_time_ms", {"cgroup": CgroupFacts(1, frozenset({"cpu", "cpuacct", "memory", "pids"}))},
    ),
    **{
        f"network-{mode}": (
            kit.text(('network = "off"', f'network = "{mode}"')), {"network": NetworkFacts("an uplink", "name one")},
            "resources.network", {"network": NetworkFacts("", "")},
        )
        for mode in ("outbound-https-only", "full")
    },
    "write": (WRITES, {}, "permissions.filesystem.write[0]", {"granted": ROOM}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNABLE)
def test_what_this_host_lacks_is_refused_and_granted_where_it_is_there(name: str) -> None:
    document, lacking, key, mended = UNABLE[name]
    manifest = parse(document.encode())
    host: HostFacts = structs.replace(kit.HOST, **lacking)
    with pytest.raises(errors.NotEnforceableError) as caught:
        enforceable.check(manifest, host)
    assert caught.value.details["grant"] == key
    assert caught.value.where.startswith("agent.toml:")
    enforceable.check(manifest, structs.replace(kit.HOST, **mended))


def test_every_finding_is_listed_what_is_not_built_first() -> None:
    document = HERMES.replace('"off"', '"full"')
    found = list(enforceable.findings(parse(document.encode()), structs.replace(kit.HOST, runsc=None)))
    assert [f.code for f in found] == ["not_yet_enforceable", "not_enforceable", "not_enforceable"]


def test_host_that_nobody_looked_at_has_no_network() -> None:
    manifest = parse(kit.text(('network = "off"', 'network = "full"')).encode())
    assert kit.HOST.network == NetworkFacts()
    with pytest.raises(errors.NotEnforceableError, match="a look at this host"):
        enforceable.check(manifest, kit.HOST)


def test_every_limit_of_resources_is_enforced_or_refused() -> None:
    """Each limit that a manifest can contain is either compiled or named here: none is ignored."""
    compiled = {"cpu_ms_per_task", "memory_mb", "disk_mb", "pids_max", "cpu_millis", "cpu_weight", "swap_mb"}
    compiled |= {"cpu_time_ms", "net_bps", *IO}
    refused = {key.removeprefix("resources.") for key in enforceable.NOT_YET if key.startswith("resources.")}
    assert compiled | refused == {*UNITS}
    assert not compiled & refused


@pytest.mark.parametrize("name", IO)
def test_limit_that_no_hierarchy_here_can_hold_is_refused(name: str) -> None:
    """cgroup v1 does not limit buffered writes (decisions.md); cgroup v2 needs its controller."""
    manifest = parse(limit(f"{name} = 1000").encode())
    v1 = structs.replace(kit.HOST, cgroup=CgroupFacts(1, frozenset({"cpu", "io", "memory", "pids"})))
    for host, lacking in ((v1, "cgroup version 2"), (kit.HOST, "the cgroup controller `io`")):
        (found,) = enforceable.findings(manifest, host)
        assert (found.code, found.details["grant"]) == ("not_enforceable", f"resources.{name}")
        assert lacking in str(found)
    assert not list(enforceable.findings(manifest, IO_HOST))
    assert not list(enforceable.findings(kit.manifest(), v1))
