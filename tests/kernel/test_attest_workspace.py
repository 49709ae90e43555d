"""A live run's workspace as attestation sees it: the overlay that the supervisor made, and nothing in its place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.workspace.caller import CallerIdentity
from sandbox.workspace.session import GivenDirectory
from tests.kernel.live_runs import live
from tests.kernel.test_attest import attempt, within
from tests.kernel.world import World

OWNER = 1000
MORE = '[workspace]\nmode = "overlay"\nfrom = ["/srv"]\nmax_mb = 8\n'
ANOTHER = {
    "an empty file system": "libc.mount('none', '/work', 'tmpfs')",
    "the directory itself": "libc.mount('/work/sub', '/work', flags=libc.MS_BIND)",
    "a mount below": "libc.mount('none', '/work/sub', 'tmpfs')",
}


@pytest.fixture
def project() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        top = Path(made) / "project"
        (top / "sub").mkdir(parents=True)
        (top / ".env").write_text("TOKEN=secret")
        for path in (Path(made), top, *top.rglob("*")):
            os.chown(path, OWNER, OWNER)
        yield top


@pytest.mark.parametrize("what", ANOTHER)
def test_mount_made_by_hand_is_drift(world: World, project: Path, what: str) -> None:
    world.configure(attest_seconds=3600)
    fd = os.open(project, os.O_RDONLY | os.O_DIRECTORY)
    try:
        request = {"workspace": GivenDirectory(fd, CallerIdentity(OWNER, OWNER, (OWNER,)))}
        with live(world, more=MORE, disk_mb=64, request=request) as one:
            assert one.report().holds, "control"
            within(one.family().gofer.name.pid, ANOTHER[what])
            assert [layer.name for layer in one.report().layers if not layer.holds] == ["mounts"]
    finally:
        os.close(fd)


def test_kernel_lets_root_take_no_flag_from_overlay(world: World, project: Path) -> None:
    """Its flags are locked, as those of every mount of the gofer."""
    world.configure(attest_seconds=3600)
    fd = os.open(project, os.O_RDONLY | os.O_DIRECTORY)
    try:
        request = {"workspace": GivenDirectory(fd, CallerIdentity(OWNER, OWNER, (OWNER,)))}
        with live(world, more=MORE, disk_mb=64, request=request) as one:
            gofer = one.family().gofer.name.pid
            kept = "libc.MS_REMOUNT | libc.MS_BIND | libc.MS_NOSUID | libc.MS_NODEV"
            assert attempt(gofer, f"libc.mount('none', '/work', flags={kept})") == "", "control: the same flags"
            for flag in ("NOSUID", "NODEV"):
                refused = attempt(gofer, f"libc.mount('none', '/work', flags=({kept}) & ~libc.MS_{flag})")
                assert "Operation not permitted" in refused
    finally:
        os.close(fd)
