"""Which entries of a directory have a mount of another device; the mounts are this machine's."""

from __future__ import annotations

from pathlib import Path

from sandbox.storage import other_mounts


def test_mount_of_another_device_is_found_by_first_name(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "root").symlink_to("/")
    assert "proc" in other_mounts.names(Path("/"))
    assert "proc" in other_mounts.names(tmp_path / "root" / ".")
    assert other_mounts.names(tmp_path) == frozenset()
    assert other_mounts.names(tmp_path / "absent") == frozenset()
