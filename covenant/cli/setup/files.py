"""The system parts of an installation, from one table: `covenant setup` and the packages of a release make them."""

from __future__ import annotations

import gzip
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from covenant.cli.setup import manual
from policy import errors

COMMANDS: Final = ("covenant", "covenant-supervisor", "covenantd")
# The units name the environment of a package; another environment takes its place in them.
PACKAGE_PREFIX: Final = "/opt/covenant"
# Files that an operator changes: one that is there is kept.
CONFIGURATION: Final = ("etc/covenant/config.toml",)
_COMPLETIONS: Final = {
    "bash": "usr/share/bash-completion/completions/covenant",
    "zsh": "usr/share/zsh/vendor-completions/_covenant",
    "fish": "usr/share/fish/vendor_completions.d/covenant.fish",
}
_COPIES: Final = {
    "system/sysusers.conf": "usr/lib/sysusers.d/covenant.conf",
    "system/tmpfiles.conf": "usr/lib/tmpfiles.d/covenant.conf",
    "system/config.toml": "etc/covenant/config.toml",
}
_UNITS: Final = "usr/lib/systemd/system"


@dataclass(frozen=True, slots=True)
class Part:
    """One file below the root, or a symbolic link if ``target`` is set. ``place`` is relative."""

    place: str
    content: bytes = b""
    target: str = ""

    def same(self, root: Path) -> bool:
        """Whether the file below ``root`` is exactly this one."""
        path = root / self.place
        if self.target or path.is_symlink():
            return path.is_symlink() and os.readlink(path) == self.target
        return path.is_file() and path.read_bytes() == self.content

    def lay(self, root: Path) -> None:
        """Write it in one step, with the modes of a package: 0755 and 0644."""
        path = root / self.place
        made = path.with_name(f".{path.name}.covenant")
        _directory(path.parent, root)
        made.unlink(missing_ok=True)
        if self.target:
            made.symlink_to(self.target)
        else:
            made.write_bytes(self.content)
            made.chmod(0o644)
        made.replace(path)


def fault(path: Path, info: os.stat_result) -> str:
    """Return why services may not run code below this directory; empty if they may."""
    if path in (Path("/home"), Path("/root")):
        return f"`{path}` holds homes, which the units do not show to the services"
    if info.st_uid != 0 or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"`{path}` can be changed by another user than root, and root would run what is in it"
    return "" if info.st_mode & stat.S_IXOTH else f"`{path}` cannot be entered by the daemon's user"


def data() -> Path:
    """Return the directory of units and settings: inside the wheel, or `packaging` of a clone."""
    inside = Path(__file__).with_name("data")
    return inside if inside.is_dir() else Path(__file__).resolve().parents[3] / "packaging"


def parts(prefix: str, version: str) -> Iterator[Part]:
    """Yield every part of an installation whose environment is ``prefix``.

    Raises:
        errors.UsageError: this installation lacks the files of the table.
    """
    place = data()
    if not (place / "systemd").is_dir():
        raise errors.UsageError(
            "this installation has no units", hint="install the wheel of a release", where=str(place)
        )
    for name, target in _COPIES.items():
        yield Part(target, (place / name).read_bytes())
    for unit in sorted((place / "systemd").iterdir()):
        content = unit.read_bytes().replace(f"={PACKAGE_PREFIX}/bin/".encode(), f"={prefix}/bin/".encode())
        yield Part(f"{_UNITS}/{unit.name}", content)
    for name in COMMANDS:
        yield Part(f"usr/bin/{name}", target=f"{prefix}/bin/{name}")
    for shell, target in _COMPLETIONS.items():
        yield Part(target, _said("completion", shell))
    yield from _manual(version)


def _manual(version: str) -> Iterator[Part]:
    from covenant.cli.main import cli

    made = dict(manual.pages(cli, name="covenant", version=version))
    for name, program in (("covenant-supervisor", "sandbox.serve.start"), ("covenantd", "covenant.start")):
        text = _run(f"import sys; sys.argv[0] = {name!r}; from {program} import entry; sys.exit(entry())", "--help")
        made[name] = manual.service(name, text.decode(), version=version)
    for name in sorted(made):
        yield Part(f"usr/share/man/man1/{name}.1.gz", gzip.compress(made[name].encode(), 9, mtime=0))


def _said(*words: str) -> bytes:
    return _run("import sys; from covenant.cli.main import entry; sys.exit(entry())", *words)


def _run(code: str, *words: str) -> bytes:
    """Run this installation's own code, where no terminal and no variable of the caller changes its output."""
    environment = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin", "COLUMNS": "80", "HOME": "/nonexistent"}
    flags = ["-B"] if "PYTHONPATH" in os.environ else ["-IB"]
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, *flags, "-c", code, *words], env=environment, capture_output=True, check=False, timeout=120
    )
    if done.returncode != 0:
        raise errors.UsageError(f"`{' '.join(words)}` failed: {done.stderr.decode(errors='replace')[-500:]}")
    return done.stdout


def _directory(path: Path, root: Path) -> None:
    """Make a directory below the root. In a tree no link leads out of it."""
    if root != Path("/") and path.is_symlink():
        raise errors.UsageError(f"`{path}` is a symbolic link", hint="name an empty directory", where=str(root))
    if path == root:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        return
    _directory(path.parent, root)
    if not path.is_dir():
        path.mkdir(mode=0o755)
        path.chmod(0o755)
