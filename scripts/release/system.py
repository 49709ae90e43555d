"""The files of a package outside /opt: commands, units, users, configuration, completion, man pages, documents."""

from __future__ import annotations

import datetime
import email.utils
import gzip
import pathlib
import shutil

from scripts.machine import console
from scripts.release.environment import COMMANDS, PLACE
from scripts.release.recipe import MAINTAINER, Source

_SHELLS = {
    "bash": "usr/share/bash-completion/completions/covenant",
    "zsh": "usr/share/zsh/vendor-completions/_covenant",
    "fish": "usr/share/fish/vendor_completions.d/covenant.fish",
}
_FILES = {
    "packaging/system/sysusers.conf": "usr/lib/sysusers.d/covenant.conf",
    "packaging/system/tmpfiles.conf": "usr/lib/tmpfiles.d/covenant.conf",
    "packaging/system/config.toml": "etc/covenant/config.toml",
    "packaging/system/copyright": "usr/share/doc/covenant/copyright",
    "packaging/system/lintian-overrides": "usr/share/lintian/overrides/covenant",
    "README.md": "usr/share/doc/covenant/README.md",
    "SECURITY.md": "usr/share/doc/covenant/SECURITY.md",
}


def make(source: Source, tree: pathlib.Path, tools: pathlib.Path) -> None:
    """Add to `tree` what the distribution's own tools look for at their places.

    Raises:
        SetupError: the command of the tree does not run, or its man pages cannot be made.
    """
    console.change("units, users, completion, man pages and documents")
    for name, place in _FILES.items():
        _copy(source.clone / name, tree / place)
    for path in sorted((source.clone / "packaging/systemd").iterdir()):
        _copy(path, tree / "usr/lib/systemd/system" / path.name)
    for name in source.files:
        if name.startswith("docs/") and not name.startswith("docs/adr/"):
            _copy(source.clone / name, tree / "usr/share/doc/covenant" / name.removeprefix("docs/"))
    (tree / "usr/bin").mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        (tree / "usr/bin" / name).symlink_to(f"{PLACE}/bin/{name}")
    _copy(source.clone / "CHANGELOG.md", tree / "usr/share/doc/covenant/CHANGELOG.md")
    _packed(tree / "usr/share/doc/covenant/changelog.gz", _changelog(source).encode())
    _completion(source, tree)
    _manual(source, tree, tools)


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


def _site(tree: pathlib.Path) -> pathlib.Path:
    [found] = (tree / PLACE.lstrip("/") / "lib").glob("python3.*/site-packages")
    return found


def _completion(source: Source, tree: pathlib.Path) -> None:
    code = "import sys; from covenant.cli.main import entry; sys.exit(entry())"
    for shell, place in _SHELLS.items():
        command = [str(tree / PLACE.lstrip("/") / "bin/python"), "-IB", "-c", code, "completion", shell]
        (tree / place).parent.mkdir(parents=True, exist_ok=True)
        (tree / place).write_text(console.run(command, env=source.environment))


def _manual(source: Source, tree: pathlib.Path, tools: pathlib.Path) -> None:
    """One page for each verb, made from its help text by click-man, and the list of them as covenant(1)."""
    pages = tree.parent / "man"
    pages.mkdir()
    script = pathlib.Path(__file__).with_name("manual.py")
    environment = {**source.environment, "PYTHONPATH": str(_site(tree)), "PYTHONDONTWRITEBYTECODE": "1"}
    console.run([str(tools / "python"), str(script), str(pages), source.version], env=environment)
    for name in COMMANDS[1:]:
        (pages / f"{name}.1").write_text(_page(source, tree, name))
    for path in sorted(pages.iterdir()):
        _packed(tree / "usr/share/man/man1" / (path.name + ".gz"), path.read_bytes())


def _page(source: Source, tree: pathlib.Path, name: str) -> str:
    """A page of a service: its help text as it is."""
    binary = tree / PLACE.lstrip("/") / "bin"
    text = console.run([str(binary / "python"), "-IB", str(binary / name), "--help"], env=source.environment)
    body = text.replace("\\", "\\e").replace("-", "\\-")
    lines = [f".{line}" if line.startswith((".", "'")) else line for line in body.splitlines()]
    head = f'.TH {name} 1 "" "{source.version}" "Covenant"\n.SH NAME\n{name} \\- service of Covenant\n'
    return head + ".SH SYNOPSIS\n.nf\n" + "\n".join(lines) + "\n.fi\n"
