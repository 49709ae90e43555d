"""The trust anchors of the host as files of a root: its bundle, the link that OpenSSL follows, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.compile.mounts import ANCHORS
from sandbox.config import Config
from sandbox.rootfs import trust_anchors

BUNDLE, LINK = ANCHORS


def left(tmp_path: Path, mounted: list[str]) -> list[str]:
    (tmp_path / "closures").mkdir()
    (made,) = trust_anchors.closures(Config(state=tmp_path), mounted)
    return [file.path for file in made.files if file.kind != "dir"]


@pytest.mark.parametrize(
    ("mounted", "expected"),
    [
        ([], [BUNDLE, LINK]),
        (["/etc/ssl/certs"], [LINK]),
        ([BUNDLE], [LINK]),
        (["/usr/lib/ssl"], [BUNDLE]),
        (["/usr/lib/ssl/certs", "/etc/ssl/openssl.cnf"], [BUNDLE, LINK]),
    ],
)
def test_granted_path_takes_the_place(tmp_path: Path, mounted: list[str], expected: list[str]) -> None:
    assert left(tmp_path, mounted) == expected


def test_bundle_is_the_hosts_and_remembered(tmp_path: Path) -> None:
    (tmp_path / "closures").mkdir()
    config = Config(state=tmp_path)
    (first,), (second,) = trust_anchors.closures(config, []), trust_anchors.closures(config, [])
    assert first == second
    by_path = {file.path: file for file in first.files}
    assert by_path[BUNDLE].size == Path(BUNDLE).stat().st_size
    assert by_path[LINK].target == BUNDLE


def test_host_without_bundle_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_anchors, "BUNDLE", str(tmp_path / "none"))
    assert trust_anchors.closures(Config(state=tmp_path), []) == []
