"""Which mount of a table covers a granted path, or a part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.kernel.fs import filesystems
from sandbox.kernel.fs.filesystems import Mount
from sandbox.rootfs import covered
from sandbox.standby import fingerprints

ROOT, DATA = 22, 30
# A disk at /srv/data, with nothing over it.
TABLE = r"""
1 1 0:2 / / rw - rootfs rootfs rw
22 1 8:2 / / rw - ext4 /dev/sda2 rw
25 22 0:5 / /proc rw - proc proc rw
30 22 7:0 / /srv/data rw - ext4 /dev/loop0 rw
""".strip()


def table(*more: str) -> list[Mount]:
    """The table with these lines below it."""
    return [*filesystems.mounts("\n".join((TABLE, *more)))]


@pytest.mark.parametrize(
    ("number", "path", "line", "point"),
    [
        (ROOT, "/srv/docs", r"40 22 0:9 / /srv/docs/x rw - tmpfs none rw", "/srv/docs/x"),
        (ROOT, "/srv/docs", r"40 22 8:2 /etc/motd /srv/docs/a/b rw - ext4 /dev/sda2 rw", "/srv/docs/a/b"),
        (ROOT, "/srv/docs", r"40 22 0:9 / /srv/docs/a\040b rw - tmpfs none rw", "/srv/docs/a b"),
        (DATA, "/srv/data", r"40 30 0:9 / /srv/data/x rw - tmpfs none rw", "/srv/data/x"),
        (DATA, "/srv/data/in", r"40 30 0:9 / /srv/data/in/x rw - tmpfs none rw", "/srv/data/in/x"),
        # Over the path itself, and over a directory above it.
        (ROOT, "/srv/docs", r"40 22 0:9 / /srv/docs rw - tmpfs none rw", "/srv/docs"),
        (DATA, "/srv/data", r"40 30 0:9 / /srv/data rw - tmpfs none rw", "/srv/data"),
        (DATA, "/srv/data/in", r"40 22 0:9 / /srv rw - tmpfs none rw", "/srv"),
        (ROOT, "/srv/page", r"40 22 0:9 / /srv/page rw - tmpfs none rw", "/srv/page"),
        (ROOT, "/", r"40 22 0:9 / /srv/docs rw - tmpfs none rw", "/proc"),
    ],
)
def test_mount_over_part_is_found(number: int, path: str, line: str, point: str) -> None:
    if path != "/":
        assert covered.over(number, path, table()) is None, "control"
    assert covered.over(number, path, table(line)) == point


@pytest.mark.parametrize(
    ("number", "path", "line"),
    [
        (ROOT, "/srv/docs", r"40 22 0:9 / /srv/docs2 rw - tmpfs none rw"),
        (ROOT, "/srv/docs", r"40 22 0:9 / /srv/other/docs rw - tmpfs none rw"),
        # It lies in what /srv/docs was opened over: that mount is covered itself.
        (40, "/srv/docs", "40 22 0:9 / /srv/docs rw - tmpfs none rw\n41 22 0:8 / /srv/docs/x rw - tmpfs none rw"),
        # One mount on another at one place: the upper one was opened.
        (41, "/srv/docs", "40 22 0:9 / /srv/docs rw - tmpfs none rw\n41 40 0:8 / /srv/docs rw - tmpfs none rw"),
    ],
)
def test_mount_elsewhere_covers_nothing(number: int, path: str, line: str) -> None:
    assert covered.over(number, path, table(line)) is None


def test_path_for_writing_may_lie_in_one_for_reading() -> None:
    assert covered.over(ROOT, "/srv", table()) == "/srv/data"
    assert covered.over(ROOT, "/srv", table(), beside={"/srv/data"}) is None
    more = table("40 30 0:9 / /srv/data/x rw - tmpfs none rw", "41 22 0:9 / /srv/y rw - tmpfs none rw")
    assert covered.over(ROOT, "/srv", more, beside={"/srv/data"}) == "/srv/y"
    assert covered.over(DATA, "/srv/data", more) == "/srv/data/x"


def test_path_whose_mount_is_gone_is_covered() -> None:
    assert covered.over(99, "/srv/docs", table()) == "/srv/docs"


def test_table_that_leads_in_circle_ends() -> None:
    circle = "50 51 0:9 / /a rw - tmpfs none rw\n51 50 0:9 / / rw - tmpfs none rw"
    assert covered.over(50, "/a", table(circle)) is None


def test_only_paths_of_host_are_granted() -> None:
    plan = [
        {"type": "bind", "source": source, "destination": f"/{source}", "options": ["ro"]}
        for source in ("package", "resolver", "credentials", "/srv/docs")
    ]
    assert [m["source"] for m in covered.granted([*plan, {"type": "tmpfs", "source": ""}])] == ["/srv/docs"]
    assert [*covered.found(plan, {"/srv/docs": ROOT}, table())] == []
    line = "40 22 0:9 / /srv/docs/x rw - tmpfs none rw"
    assert [*covered.found(plan, {"/srv/docs": ROOT}, table(line))] == [("/srv/docs", "/srv/docs/x")]
    assert [*covered.found(plan, {}, table(line))] == [], "it was opened before this was written down"


def test_covered_source_of_instance_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path)
    plan = [{"type": "bind", "source": path, "destination": path, "options": ["ro"]}]
    info = tmp_path.stat()
    sources = fingerprints.Sources({path: (info.st_dev, info.st_ino)}, {path: ROOT}, plan)
    before, after = table(), table(f"40 22 0:9 / {path}/x rw - tmpfs none rw")
    monkeypatch.setattr(filesystems, "mounts", lambda: iter(before))
    assert sources.changed() is None, "control"
    monkeypatch.setattr(filesystems, "mounts", lambda: iter(after))
    assert sources.changed() == path
