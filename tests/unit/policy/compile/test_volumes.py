"""Volumes in mounts.json: their place, flags and size, and that the proof reads them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from policy import errors
from policy.compile import mounts
from policy.decompile import read as reading
from policy.decompile.mounts import ReadVolume
from policy.explain import diff, report
from policy.host import VolumeFacts
from tests import proof_kit
from tests.unit.policy.compile import sample

VOLUMES = {"data": VolumeFacts(24), "own": VolumeFacts(16)}
GRANT = '[permissions.filesystem]\nwrite = ["volume:data:/data"]\n'
WORKSPACE = '[workspace]\nmode = "volume"\nvolume = "own"\npath = "/home/agent"\n'
EXEC = 'exec = true\n[permissions.executables]\nallow = ["workspace"]\n'


def case(more: str, *, volumes: Mapping[str, VolumeFacts] = VOLUMES, disk_mb: int = 64) -> proof_kit.Case:
    manifest = sample.manifest(filesystem="host", more=more, resources=f"disk_mb = {disk_mb}")
    return proof_kit.case(manifest, proof_kit.host(volumes=volumes))


def plan(more: str) -> dict[str, Any]:
    found: dict[str, Any] = case(more).artefacts.json("mounts.json")
    return found


def mount(more: str, place: str) -> dict[str, Any]:
    (found,) = [one for one in plan(more)["mounts"] if one["destination"] == place]
    return dict(found)


def test_volume_is_mounted_at_its_place() -> None:
    found = mount(GRANT, "/data")
    assert found["source"] == "volume:data"
    assert found["options"] == ["rw", "nosuid", "nodev", "noexec", "nosymfollow", "idmapped"]
    assert plan(GRANT)["rooms"] == {"/data": 24}
    assert mounts.host_flags(found["source"], found["options"]) == tuple(found["options"])


@pytest.mark.parametrize(("more", "noexec"), [("", True), (EXEC, False)])
def test_workspace_volume_loses_noexec_by_its_tree(more: str, noexec: bool) -> None:
    found = mount(WORKSPACE + more, "/home/agent")
    assert found["source"] == "workspace-volume:own"
    assert ("noexec" in found["options"]) == noexec
    assert "noexec" not in mounts.host_flags(found["source"], found["options"])


def test_sizes_are_a_part_of_disk_mb() -> None:
    with pytest.raises(errors.NotEnforceableError, match="have 40 MiB"):
        case(GRANT + WORKSPACE, disk_mb=40)


@pytest.mark.parametrize("place", ["/tmp/x", "/workspace", "/proc/1", "/run/covenant", "/dev/shm", "/usr"])
def test_taken_place_is_refused(place: str) -> None:
    with pytest.raises(errors.NotEnforceableError, match=r"collides|covers"):
        case(GRANT.replace("/data", place))


def test_nested_volumes_are_refused() -> None:
    with pytest.raises(errors.NotEnforceableError, match="collides"):
        case(GRANT + WORKSPACE.replace("/home/agent", "/data/own"))


def test_granted_path_within_volume_is_refused() -> None:
    with pytest.raises(errors.NotEnforceableError, match="collides"):
        case('[permissions.filesystem]\nread = ["/opt/a"]\nwrite = ["volume:data:/opt"]\n')


def test_missing_volume_names_the_line_that_makes_it() -> None:
    with pytest.raises(errors.NotEnforceableError) as e:
        case(GRANT, volumes={})
    assert e.value.hint == "covenant volume create data --size 1G"


@pytest.mark.parametrize("more", [GRANT, GRANT + "shared = true\n", WORKSPACE, WORKSPACE + EXEC])
def test_proof_reads_back_what_was_granted(more: str) -> None:
    one = case(more)
    one.prove()
    found = reading.read(one.artefacts.files)
    assert found.grants.filesystem == one.effective.filesystem
    assert found.seen.volumes
    assert not diff.compare_artefacts(one.artefacts, one.artefacts).widens
    rows = report.explain(one.artefacts, where=str)
    assert any(row.key in ("permissions.filesystem.write[0]", "workspace.volume") for row in rows)


def test_programs_of_workspace_volume_are_read_back() -> None:
    found = reading.read(case(WORKSPACE + EXEC).artefacts.files)
    assert found.seen.volumes == (ReadVolume("own", "/home/agent", programs=True),)
    assert found.grants.executables.trees == {"workspace"}


def test_diff_names_volume_and_sharing() -> None:
    shared = GRANT + "shared = true\n"
    rows = diff.compare(case("").effective, case(shared).effective)
    assert rows.widens
    assert "+1 volume" in rows.summary()
    assert "+1 shared write" in rows.summary()
    narrower = diff.compare(case(shared).effective, case(GRANT).effective)
    assert not narrower.widens


def test_child_has_volume_only_where_parent_has_it() -> None:
    parent, child = case(GRANT).effective, case(GRANT.replace("/data", "/mnt/data")).effective
    assert not child.is_subset(parent)
    assert child.meet(parent).filesystem.volumes.listing() == []
    assert parent.meet(parent) == parent
