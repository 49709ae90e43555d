"""The files of a package outside /opt: what `covenant setup` of the packed environment lays, and documents."""

from __future__ import annotations

import datetime
import email.utils
import gzip
import pathlib
import shutil

from scripts.machine import console
from scripts.release.environment import PLACE
from scripts.release.recipe import MAINTAINER, Source

_FILES = {
    "packaging/system/copyright": "usr/share/doc/covenant/copyright",
    "packaging/system/lintian-overrides": "usr/share/lintian/overrides/covenant",
    "README.md": "usr/share/doc/covenant/README.md",
    "SECURITY.md": "usr/share/doc/covenant/SECURITY.md",
}


# Which files setup laid: dpkg and rpm have their own lists.
_RECORD = "var/lib/covenant-setup.json"


def make(source: Source, tree: pathlib.Path) -> None:
    """Add to `tree` what the distribution's own tools look for at their places.

    Raises:
        SetupError: the command of the tree does not run.
    """
    console.change("units, users, completion, man pages and documents")
    _setup(source, tree)
    for name, place in _FILES.items():
        _copy(source.clone / name, tree / place)
    for name in source.files:
        if name.startswith("docs/") and not name.startswith("docs/adr/"):
            _copy(source.clone / name, tree / "usr/share/doc/covenant" / name.removeprefix("docs/"))
    _copy(source.clone / "CHANGELOG.md", tree / "usr/share/doc/covenant/CHANGELOG.md")
    _packed(tree / "usr/share/doc/covenant/changelog.gz", _changelog(source).encode())


def _copy(path: pathlib.Path, target: pathlib.Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def _packed(target: pathlib.Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(content, 9, mtime=0))


def _changelog(source: Source) -> str:
    """The one entry that dpkg's tools read; what a user notices is in CHANGELOG.md beside it."""
    day = email.utils.format_datetime(datetime.datetime.fromtimestamp(source.epoch, datetime.UTC))
    entry = f"covenant ({source.version}) stable; urgency=medium\n\n  * What changed: CHANGELOG.md in this directory.\n"
    return f"{entry}\n -- {MAINTAINER}  {day}\n"


def _setup(source: Source, tree: pathlib.Path) -> None:
    """Have the packed environment lay its own parts: an installation of the wheel gets exactly the same."""
    code = "import sys; from covenant.cli.main import entry; sys.exit(entry())"
    words = ["setup", "--root", str(tree), "--prefix", PLACE]
    console.run([str(tree / PLACE.lstrip("/") / "bin/python"), "-IB", "-c", code, *words], env=source.environment)
    record = tree / _RECORD
    record.unlink()
    record.parent.rmdir()
    record.parent.parent.rmdir()
