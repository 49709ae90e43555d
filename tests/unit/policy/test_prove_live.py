"""Kernel beside manifest: what was compiled holds, what is lower holds, and anything else is told by its layer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.compile import bundle
from policy.compile import mounts as compiled_mounts
from policy.decompile import documents
from policy.decompile.live import Readout
from policy.decompile.read import read
from policy.prove import live
from policy.prove.live import Standing
from tests import proof_kit
from tests.proof_kit import Case

RUN, UID = "1b4e28ba-2fa1-41d2-883f-0016d3cca427", 2_000_007


@functools.cache
def compiled(name: str = "much") -> Case:
    return proof_kit.CASES[name]()


def readout(case: Case, *, version: int = 2) -> Readout:
    """A kernel that holds exactly what was compiled, without a gateway."""
    runtime, mounts = case.artefacts.json("runtime.json"), case.artefacts.json("mounts.json")
    binds = {
        m["destination"]: compiled_mounts.host_flags(m["source"], m["options"])
        for m in mounts["mounts"]
        if m["type"] == "bind"
    }
    return Readout(
        run_id=RUN,
        uid=UID,
        config=bundle.instantiate(case.artefacts, run_id=RUN, uid=UID),
        flags=tuple(f"{name}={value}" for name, value in runtime["flags"].items()),
        runsc_sha256=runtime["runsc"]["sha256"],
        cgroup_version=version,
        limits={e["file"]: e["value"] for e in case.artefacts.json("cgroup.json")[f"v{version}"]},
        mounts={"/": ("ro", "nosuid", "nodev"), **binds},
    )


def standings(found: Readout, case: Case | None = None) -> dict[str, Standing]:
    """Layer -> how it stands, of those that are not equal."""
    layers = live.compare((case or compiled()).artefacts, found)
    return {layer.name: layer.standing for layer in layers if layer.standing != Standing.EQUAL}


@pytest.mark.parametrize("version", [1, 2])
def test_kernel_that_holds_what_was_compiled_is_equal_in_every_layer(version: int) -> None:
    layers = live.compare(compiled().artefacts, readout(compiled(), version=version))
    assert {layer.standing for layer in layers} == {Standing.EQUAL}
    assert [layer.name for layer in layers] == ["bundle", "runtime", "cgroup", "mounts", "firewall"]


def _limit(**files: str | None) -> Callable[[Readout], Readout]:
    return lambda found: structs.replace(
        found, limits={**found.limits, **{k.replace("_", "."): v for k, v in files.items()}}
    )


def _mount(place: str, *options: str) -> Callable[[Readout], Readout]:
    return lambda found: structs.replace(found, mounts={**found.mounts, place: options})


def _flag(before: str, after: str) -> Callable[[Readout], Readout]:
    return lambda found: structs.replace(found, flags=tuple(after if one == before else one for one in found.flags))


def _config(edit: Callable[[dict[str, Any]], None], *, spelled: bool = True) -> Callable[[Readout], Readout]:
    def change(found: Readout) -> Readout:
        document = json.loads(found.config)
        edit(document)
        return structs.replace(
            found, config=json.dumps(document, sort_keys=spelled, indent=None if spelled else 1).encode()
        )

    return change


# What is found -> the one layer that is not equal, and how it stands.
FOUND: dict[str, tuple[Callable[[Readout], Readout], str, Standing]] = {
    "more weight": (_limit(cpu_weight="200"), "cgroup", Standing.WIDER),
    "less weight": (_limit(cpu_weight="1"), "cgroup", Standing.NARROWER),
    "no quota": (_limit(cpu_max="max 100000"), "cgroup", Standing.UNREADABLE),
    "a hundredth of a core": (_limit(cpu_max="1000 100000"), "cgroup", Standing.NARROWER),
    "a file that is gone": (_limit(pids_max=None), "cgroup", Standing.UNREADABLE),
    "memory that comes from no grant": (_limit(memory_max="123456789"), "cgroup", Standing.UNREADABLE),
    "a writable place": (
        _mount("/opt/a", "rw", "nosuid", "nodev", "noexec", "nosymfollow", "idmapped"), "mounts", Standing.UNREADABLE,
    ),
    "a self-test that does not run": (
        lambda found: structs.replace(found, arguments=("/canary",)), "bundle", Standing.UNREADABLE,
    ),
    "files of a granted path that can be started": (
        _config(lambda c: next(m for m in c["mounts"] if m["destination"] == "/opt/a")["options"].remove("noexec")),
        "bundle",
        Standing.UNREADABLE,
    ),
    "a flag nobody knows": (_mount("/opt/a", "ro", "nosuid", "nodev", "new"), "mounts", Standing.UNREADABLE),
    "noexec where libraries are mapped": (
        _mount("/opt/a", "ro", "nosuid", "nodev", "noexec"),
        "mounts",
        Standing.UNREADABLE,
    ),
    "a path for reading without nosuid": (_mount("/opt/a", "ro", "nodev"), "mounts", Standing.UNREADABLE),
    "a mount more": (_mount("/opt/b", "ro", "nosuid", "nodev", "noexec"), "mounts", Standing.UNREADABLE),
    "a writable root": (_mount("/", "rw", "nosuid", "nodev"), "mounts", Standing.UNREADABLE),
    "no root": (
        lambda found: structs.replace(found, mounts={p: o for p, o in found.mounts.items() if p != "/"}),
        "mounts", Standing.UNREADABLE,
    ),
    "a mount less": (
        lambda found: structs.replace(found, mounts={p: o for p, o in found.mounts.items() if p != "/opt/a"}),
        "mounts", Standing.UNREADABLE,
    ),
    "no filter": (_flag("--oci-seccomp=true", "--oci-seccomp=false"), "runtime", Standing.UNREADABLE),
    "a network stack": (_flag("--network=none", "--network=host"), "runtime", Standing.UNREADABLE),
    "a flag twice": (
        lambda found: structs.replace(found, flags=(*found.flags, "--oci-seccomp=true")),
        "runtime",
        Standing.UNREADABLE,
    ),
    "a flag more": (
        lambda found: structs.replace(found, flags=(*found.flags, "--debug=true")),
        "runtime",
        Standing.UNREADABLE,
    ),
    "another runsc": (lambda found: structs.replace(found, runsc_sha256="0" * 64), "runtime", Standing.WIDER),
    "no digest": (lambda found: structs.replace(found, runsc_sha256="gone"), "runtime", Standing.UNREADABLE),
    "root inside": (
        _config(lambda c: c["process"].update(user={"uid": 0, "gid": 0})), "bundle", Standing.UNREADABLE,
    ),
    "another program": (
        _config(lambda c: c["process"].update(args=[*c["process"]["args"][:-1], "other.py"])), "bundle", Standing.WIDER,
    ),
    "a capability": (
        _config(lambda c: c["process"]["capabilities"].update(effective=["CAP_SYS_ADMIN"])),
        "bundle", Standing.UNREADABLE,
    ),
    "a hook": (_config(lambda c: c.update(hooks={})), "bundle", Standing.UNREADABLE),
    "spelled otherwise": (_config(lambda c: None, spelled=False), "bundle", Standing.UNREADABLE),
    "no configuration": (lambda found: structs.replace(found, config=b"[" * 100_000), "bundle", Standing.UNREADABLE),
    "a list": (lambda found: structs.replace(found, config=b"[]"), "bundle", Standing.UNREADABLE),
    "a gateway that nobody granted": (
        lambda found: structs.replace(found, firewall=b'{"nftables": []}'), "firewall", Standing.UNREADABLE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_each_thing_that_was_changed_is_told_by_its_layer_alone(name: str) -> None:
    change, layer, standing = FOUND[name]
    assert standings(change(readout(compiled()))) == {layer: standing}


def test_what_holds_and_what_does_not() -> None:
    holds = {one for one in Standing if live.Layer("cgroup", one).holds}
    assert holds == {Standing.EQUAL, Standing.NARROWER}


def test_layer_says_what_it_found() -> None:
    layers = live.compare(compiled().artefacts, _limit(cpu_weight="200")(readout(compiled())))
    (wider,) = [layer for layer in layers if not layer.holds]
    assert wider.found == "v2: cpu_weight 200 weight" or "cpu_weight 200" in wider.found
    assert wider.expected == "nothing beyond the grants"


def test_limits_of_version_that_cannot_hold_them_are_not_understood() -> None:
    assert standings(structs.replace(readout(compiled()), cgroup_version=3)) == {"cgroup": Standing.UNREADABLE}


def test_rules_without_gateway_are_not_understood() -> None:
    case = compiled("network")
    found = readout(case)
    assert standings(found, case) == {"firewall": Standing.UNREADABLE}


IMAGE = "/state/runs/one/bundle/root.erofs"


def with_image(case: Case) -> Readout:
    """A kernel whose gofer has no root, since the sandbox reads it from a file."""
    found = readout(case)
    return structs.replace(
        found,
        config=bundle.instantiate(case.artefacts, run_id=RUN, uid=UID, image=IMAGE),
        mounts={place: flags for place, flags in found.mounts.items() if place != "/"},
        image=IMAGE,
    )


def test_root_that_is_a_file_is_equal() -> None:
    found = with_image(compiled())
    assert json.loads(found.config)["annotations"] == {
        "dev.gvisor.spec.rootfs.source": IMAGE,
        "dev.gvisor.spec.rootfs.type": "erofs",
    }
    assert standings(found) == {}


def _annotate(**more: str) -> Callable[[Readout], Readout]:
    return _config(lambda c: c.setdefault("annotations", {}).update({k.replace("_", "."): v for k, v in more.items()}))


ANNOTATED: dict[str, tuple[Callable[[Readout], Readout], dict[str, Standing]]] = {
    "another file": (_annotate(dev_gvisor_spec_rootfs_source="/x"), {"bundle": Standing.UNREADABLE}),
    "another type": (_annotate(dev_gvisor_spec_rootfs_type="bind"), {"bundle": Standing.UNREADABLE}),
    "an overlay": (_annotate(dev_gvisor_spec_rootfs_overlay="memory"), {"bundle": Standing.UNREADABLE}),
    "a flag": (_annotate(dev_gvisor_flag_network="host"), {"bundle": Standing.UNREADABLE}),
    "none": (_config(lambda c: c.pop("annotations")), {"bundle": Standing.UNREADABLE}),
    "no file made": (lambda found: structs.replace(found, image=""), {
        "bundle": Standing.UNREADABLE, "mounts": Standing.UNREADABLE,
    }),
    "a mount over it": (_mount("/", "ro", "nosuid", "nodev"), {"mounts": Standing.UNREADABLE}),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(ANNOTATED))
def test_annotation_that_was_not_made_is_drift(what: str) -> None:
    change, expected = ANNOTATED[what]
    assert standings(change(with_image(compiled()))) == expected


@pytest.mark.parametrize("name", ["dev.gvisor.spec.rootfs.source", "dev.gvisor.flag.host-uds", "x"])
def test_annotation_beside_a_directory_is_drift(name: str) -> None:
    change = _config(lambda c: c.update(annotations={name: IMAGE}))
    assert standings(change(readout(compiled()))) == {"bundle": Standing.UNREADABLE}


def test_artefacts_with_annotations_are_refused() -> None:
    """No manifest gives one, so compiled artefacts have none."""
    case = compiled()
    document = case.artefacts.json("config.json")
    document["annotations"] = {"dev.gvisor.flag.host-uds": "open"}
    files = {**case.artefacts.files, "config.json": documents.dumps(document)}
    with pytest.raises(errors.ArtefactError, match="annotations"):
        read(files)
    read(case.artefacts.files)
