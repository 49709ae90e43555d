"""Volumes in a manifest: their spelling, and the rules of a workspace that is one."""

from __future__ import annotations

import pytest

from policy import errors
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.manifest.permissions import VolumeGrant

HEAD = """\
[agent]
id = "x"
name = "x"
version = "0"
runtime = "python3"
entry = "main.py"
[resources]
network = "off"
disk_mb = 100
[sandbox]
backend = "linux-gvisor"
filesystem = "{filesystem}"
"""


def parsed(more: str, filesystem: str = "host") -> Manifest:
    return parse.parse((HEAD.format(filesystem=filesystem) + more).encode())


def write(*paths: str) -> str:
    return f"[permissions.filesystem]\nwrite = [{', '.join(f'{one!r}' for one in paths)}]\n"


def test_volumes_stand_beside_paths() -> None:
    found = parsed(write("/srv/a", "volume:data:/data", "volume:c-1:/var/cache")).permissions.filesystem
    assert found.write_paths == ((0, "/srv/a"),)
    assert found.volumes == ((1, VolumeGrant("data", "/data")), (2, VolumeGrant("c-1", "/var/cache")))


def test_workspace_volume_is_named_with_its_key() -> None:
    found = parsed(write("volume:data:/data") + '[workspace]\nmode = "volume"\nvolume = "own"\n')
    assert found.volumes == (
        ("permissions.filesystem.write[0]", VolumeGrant("data", "/data")),
        ("workspace.volume", VolumeGrant("own", "/work")),
    )


@pytest.mark.parametrize(
    "path",
    [
        *("volume:data", "volume:data:", "volume::/data", "volume:Data:/data", "volume:-a:/data", "volume:a.b:/data"),
        *("volume:../x:/data", "volume:data:data", "volume:data:/", "volume:data:/a/../b", f"volume:{'a' * 33}:/data"),
        *("volume:data:/data/", "Volume:data:/data", "volume:data:/*"),
    ],
)
def test_other_spellings_are_refused(path: str) -> None:
    with pytest.raises(errors.ManifestError):
        parsed(write(path))


@pytest.mark.parametrize("other", ["volume:data:/other", "volume:other:/data"])
def test_volume_or_place_twice_is_refused(other: str) -> None:
    with pytest.raises(errors.ManifestError, match="is named twice"):
        parsed(write("volume:data:/data", other))


def test_workspace_and_grant_of_one_volume_are_refused() -> None:
    with pytest.raises(errors.ManifestError, match="`data` is named twice"):
        parsed(write("volume:data:/data") + '[workspace]\nmode = "volume"\nvolume = "data"\n')


def test_volume_needs_file_system_of_host() -> None:
    with pytest.raises(errors.ManifestError, match=r"while sandbox.filesystem is `ephemeral`"):
        parsed(write("volume:data:/data"), "ephemeral")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('mode = "volume"', "names none"),
        ('mode = "volume"\nvolume = "A"', "no name of a volume"),
        ('mode = "volume"\nvolume = "own"\nfrom = ["/home"]', "`workspace.from` is written while mode is `volume`"),
        ('mode = "volume"\nvolume = "own"\nmask = ["x"]', "`workspace.mask`"),
        ('mode = "volume"\nvolume = "own"\nprotect = ["x"]', "`workspace.protect`"),
        ('mode = "volume"\nvolume = "own"\nmax_mb = 9', "`workspace.max_mb`"),
        ('mode = "volume"\nvolume = "own"\napply = "never"', "`workspace.apply`"),
        ('mode = "volume"\nvolume = "own"\nexec = true', "has no `workspace`"),
        ('mode = "overlay"\nvolume = "own"\nfrom = ["/home"]', "while mode is `overlay`"),
    ],
)
def test_workspace_of_both_modes_is_refused(lines: str, message: str) -> None:
    with pytest.raises(errors.ManifestError, match=message):
        parsed(f"[workspace]\n{lines}\n")


def test_workspace_volume_needs_file_system_of_host() -> None:
    with pytest.raises(errors.ManifestError, match="mode is `volume` while filesystem is `ephemeral`"):
        parsed('[workspace]\nmode = "volume"\nvolume = "own"\n', "ephemeral")
