"""Reading all artefacts back: nothing but an ArtefactError leaves it, and every place is looked at."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy import errors
from policy.compile.artefacts import NAMES, canonical
from policy.decompile import cgroup
from policy.decompile import read as reading
from tests import proof_kit
from tests.proof_kit import Case, Documents


@functools.cache
def compiled(name: str) -> Case:
    return proof_kit.CASES[name]()


def refused(name: str, edit: Any) -> str:
    with pytest.raises(errors.ArtefactError) as found:
        reading.read(compiled(name).falsified(edit).files)
    return str(found.value)


ENFORCED = tuple(name for name in NAMES if name not in ("effective.json", "provenance.json"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**64)
    | st.text(max_size=8)
    | st.sampled_from(["*", "lo", "tcp", "max"]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize("name", ENFORCED)
def test_every_enforced_artefact_is_needed(name: str) -> None:
    files = {other: raw for other, raw in compiled("network").artefacts.files.items() if other != name}
    with pytest.raises(errors.ArtefactError, match="missing"):
        reading.read(files)


def test_what_only_people_read_is_not_read() -> None:
    files = compiled("network").artefacts.files
    assert reading.read({name: files[name] for name in ENFORCED}).grants == reading.read(files).grants


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ENFORCED), st.one_of(st.binary(max_size=64), JSON.map(canonical)))
def test_other_bytes_are_refused_and_nothing_else(name: str, raw: bytes) -> None:
    files = {**compiled("network").artefacts.files, name: raw}
    with pytest.raises(errors.ArtefactError):
        reading.read(files)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([name for name in ENFORCED if name.endswith(".json")]), st.randoms(), JSON)
def test_other_values_are_refused_or_read(name: str, rng: Any, value: Any) -> None:
    """One value of a document replaced: read, or refused as an artefact; any other exception fails the test."""
    documents = Documents(compiled("rest").artefacts)
    above: Any = documents
    key: Any = name
    for _ in range(rng.randrange(8)):
        below = above[key]
        if not isinstance(below, dict | list) or not below:
            break
        above = below
        key = rng.choice(list(below)) if isinstance(below, dict) else rng.randrange(len(below))
    above[key] = value
    with contextlib.suppress(errors.ArtefactError):
        reading.read(documents.artefacts().files)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda d: d["mounts.json"].update(version=1), "mounts.json:version"),
        (lambda d: d["cgroup.json"].update(version=1), "cgroup.json:version"),
        (lambda d: d["network.json"].update(version=1), "network.json:version"),
        (lambda d: d["gates.json"].update(version=2), "(gates.json)"),
        (lambda d: d["supervision.json"].update(version=2), "supervision.json:version"),
        (lambda d: d["credentials.json"].update(version=2), "credentials.json:version"),
        (lambda d: d["runtime.json"].update(version=2), "runtime.json:version"),
        (lambda d: d["config.json"].update(ociVersion="1.2.0"), "config.json:ociVersion"),
        (lambda d: d["seccomp.json"].update(architectures=[]), "config.json:linux/seccomp"),
        (lambda d: d["seccomp.json"].update(architectures=["SCMP_ARCH_ARM"]), "config.json:linux/seccomp"),
        (lambda d: d["mounts.json"]["root"].update(closures=[]), "there is no closure"),
        (
            lambda d: d["mounts.json"]["root"]["closures"].append(d["mounts.json"]["root"]["closures"][0]),
            "stands twice",
        ),
        (lambda d: d["mounts.json"]["root"]["closures"][0].update(name="hermes"), "is no runtime"),
        (lambda d: d["mounts.json"]["root"]["closures"][1].pop("sha256"), "not bound to its content"),
        (lambda d: d["mounts.json"]["root"]["closures"][1].update(name="usr/bin/cat"), "not absolute and normalised"),
        (lambda d: d["mounts.json"]["root"]["closures"][1].update(entry="/usr/../bin/cat"), "not absolute"),
        (lambda d: d["mounts.json"]["mounts"][0].update(destination="/a/../b"), "not absolute and normalised"),
        (lambda d: d["mounts.json"]["mounts"][0].update(kind="socket"), "is none of dir, file"),
        (lambda d: d["mounts.json"]["root"]["mount_points"].pop(), "mount_points"),
        (lambda d: d["config.json"]["mounts"].pop(), "config.json:mounts"),
        (lambda d: d["config.json"]["linux"]["resources"].update(rdma={}), "config.json:linux/resources"),
        (lambda d: d["config.json"]["process"]["rlimits"].reverse(), "the limits are"),
    ],
)
def test_malformed_artefact_is_refused_with_its_place(edit: Any, says: str) -> None:
    assert says in refused("much", edit)


def test_unknown_machine_is_refused() -> None:
    def edit(d: Documents) -> None:
        d["seccomp.json"]["architectures"] = ["SCMP_ARCH_ARM"]
        d["config.json"]["linux"]["seccomp"] = d["seccomp.json"]

    assert "is no machine" in refused("much", edit)


def test_two_forms_of_filter_must_answer_alike() -> None:
    def edit(d: Documents) -> None:
        names = next(one["names"] for one in d["seccomp.json"]["syscalls"] if "getpid" in one["names"])
        names.remove("getpid")
        d["config.json"]["linux"]["seccomp"] = d["seccomp.json"]

    assert "`getpid` with arguments" in refused("much", edit)


@pytest.mark.parametrize("weight", [1, 2, 37, 50, 99, 100, 101, 5000, 9999, 10_000])
def test_shares_come_from_one_weight(weight: int) -> None:
    assert cgroup.weight_of(cgroup.shares(weight), "x") == weight


def test_every_weight_has_shares_of_its_own() -> None:
    assert len({cgroup.shares(weight) for weight in range(1, 10_001)}) == 10_000
    assert all(cgroup.weight_of(cgroup.shares(w), "x") == w for w in range(1, 10_001))


def test_overhead_and_wall_are_those_of_measurement() -> None:
    assert [cgroup.overhead_mb(1, pids) for pids in (1, 2, 9, 64, 101)] == [64, 65, 68, 96, 114]
    assert cgroup.overhead_mb(2, 64) is None
    assert [cgroup.wall(pids) for pids in (1, 64)] == [66, 192]
