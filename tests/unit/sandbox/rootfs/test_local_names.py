"""The files of every root are those that `policy why` knows, and a mount takes their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.why import files
from sandbox.rootfs import identity_files, local_names


def test_policy_why_knows_the_files() -> None:
    assert (*local_names.FILES, *identity_files.FILES) == tuple(files.OWN_FILES)


@pytest.mark.parametrize(
    ("mounted", "left"),
    [
        ([], ["/etc/hosts", "/etc/nsswitch.conf"]),
        (["/etc/resolv.conf", "/etc/hosts.d"], ["/etc/hosts", "/etc/nsswitch.conf"]),
        (["/etc/hosts"], ["/etc/nsswitch.conf"]),
        (["/etc"], []),
    ],
)
def test_mounted_path_takes_the_place_of_a_file(tmp_path: Path, mounted: list[str], left: list[str]) -> None:
    made = local_names.closure(tmp_path / "closures", mounted)
    assert [file.path for file in made.files if file.kind == "file"] == left


@pytest.mark.parametrize(
    ("mounted", "left"),
    [([], ["/etc/group", "/etc/passwd"]), (["/etc/passwd"], ["/etc/group"]), (["/etc/"], []), (["/"], [])],
)
def test_mount_takes_place_of_identity(tmp_path: Path, mounted: list[str], left: list[str]) -> None:
    made = identity_files.closure(tmp_path / "closures", range(7, 9), mounted)
    assert [file.path for file in made.files if file.kind == "file"] == left


def test_every_uid_of_the_range_has_a_name(tmp_path: Path) -> None:
    made = identity_files.closure(tmp_path / "closures", range(2_000_000, 2_000_003), [])
    group, passwd = (Path(file.source).read_text().splitlines() for file in made.files if file.kind == "file")
    assert [line.split(":")[0] for line in passwd] == ["root", "nobody", "agent", "agent", "agent"]
    assert passwd[2:] == [f"agent:x:{uid}:{uid}:agent:/tmp:/bin/sh" for uid in range(2_000_000, 2_000_003)]
    assert group == ["root:x:0:", "nogroup:x:65534:", *(f"agent:x:{uid}:" for uid in range(2_000_000, 2_000_003))]
