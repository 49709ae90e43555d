"""The system below the daemon in its image: the interpreter's own packages, as this Debian installed them."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import shutil

from scripts.machine import console
from scripts.machine.console import SetupError
from scripts.release.recipe import PYTHON, Source

# Beside the interpreter: compiled Python packages need the C++ library, and time zones are data. Authorities and names
# are taken without what else their packages depend on.
_WHOLE = ("libstdc++6",)
_ALONE = ("tzdata", "ca-certificates", "base-files", "netbase")
# Helpers of installation scripts and of desktops, which no image runs.
_LEFT_OUT = frozenset({"debconf", "debconf-2.0", "dpkg", "media-types", "mime-support", "mailcap"})
_TAKEN = re.compile(
    r"/usr/(bin|lib|lib64|share/zoneinfo|share/ca-certificates)/|/usr/share/doc/[^/]+/copyright$"
    # What a program looks up; the rest of /etc is this machine's.
    r"|/etc/(protocols|services)$"
)
_NOT_TAKEN = re.compile(
    r"/(pydoc|idlelib|lib2to3|test|tests|ensurepip|tkinter|gconv)[\d.]*/|^/usr/lib/(mime|valgrind)/"
)
_AUTHORITIES = "etc/ssl/certs/ca-certificates.crt"


def make(source: Source, root: pathlib.Path) -> list[dict[str, str]]:
    """Copy the packages below `root`, and return the name and version of each.

    Each file is compared with dpkg's digest of it, so that nothing of this machine's own is in an image.

    Raises:
        SetupError: this is no Debian, or a file is not as its package has it.
    """
    console.change("the interpreter and its libraries, as dpkg installed them")
    names = _needed(source)
    for top in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / top).mkdir(parents=True, exist_ok=True)
        (root / top).symlink_to(f"usr/{top}")
    (root / "etc").mkdir()
    made = []
    for name in names:
        _copy(name, root)
        made.append({"name": name, "version": _ask(source, "-W", "-f", "${Version}", name)})
        status = root / "var/lib/dpkg/status.d" / name
        status.parent.mkdir(parents=True, exist_ok=True)
        status.write_text(_ask(source, "-s", name))
    _authorities(root)
    return made


def _ask(source: Source, *words: str) -> str:
    return console.run(["dpkg-query", *words], env=source.environment)


def _needed(source: Source) -> list[str]:
    """The packages of the interpreter with all that they depend on, of alternatives the one that is installed."""
    program = os.path.realpath(PYTHON)
    try:
        minimal = _ask(source, "-S", program).split(":")[0]
    except SetupError as e:
        raise SetupError(f"the package of `{program}`: {e}", "make the image on Debian or Ubuntu") from e
    standard = "lib" + minimal.removesuffix("-minimal") + "-stdlib"
    wanted, found = [minimal, standard, *_WHOLE], dict.fromkeys(_ALONE)
    while wanted:
        name = wanted.pop()
        if name in found or name in _LEFT_OUT:
            continue
        found[name] = None
        said = _ask(source, "-W", "-f", "${Pre-Depends}, ${Depends}", name)
        for group in filter(None, (part.strip() for part in said.split(","))):
            choices = [re.split(r"[ :(]", one.strip())[0] for one in group.split("|")]
            wanted.append(next((one for one in choices if one in _LEFT_OUT or _installed(one)), choices[0]))
    return sorted(found)


def _installed(name: str) -> bool:
    return console.quiet(["dpkg-query", "-W", "-f", "${db:Status-Status}", name]) == (0, "installed")


def _copy(name: str, root: pathlib.Path) -> None:
    info = pathlib.Path("/var/lib/dpkg/info")
    listed = next((path for path in (info / f"{name}.list", info / f"{name}:amd64.list") if path.exists()), None)
    if listed is None:
        raise SetupError(f"dpkg has no list of the files of `{name}`", f"apt-get install --reinstall {name}")
    sums = listed.with_suffix(".md5sums")
    known = [line.partition("  ") for line in sums.read_text().splitlines()] if sums.exists() else []
    digests = {place: digest for digest, _, place in known}
    for line in sorted(listed.read_text().splitlines()):
        # A usr-merged system has /lib in /usr; packages still name the old place.
        place = os.path.join(os.path.realpath(os.path.dirname(line)), os.path.basename(line))
        if not _TAKEN.match(place) or _NOT_TAKEN.search(place):
            continue
        path, target = pathlib.Path(place), root / place.lstrip("/")
        if path.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.readlink(path))
        elif not path.is_dir():
            _file(name, path, target, digests.get(line.lstrip("/")))


def _file(name: str, path: pathlib.Path, target: pathlib.Path, digest: str | None) -> None:
    try:
        content = path.read_bytes()
    except FileNotFoundError as e:
        if path.name == "copyright":  # images of containers leave documents out
            return
        raise SetupError(f"`{path}` of {name} is not there", f"apt-get install --reinstall {name}") from e
    # dpkg keeps no digest of what an administrator may change; of those only two lists of names are taken.
    free = digest is None and path.parts[1] == "etc"
    if not free and hashlib.md5(content, usedforsecurity=False).hexdigest() != digest:
        raise SetupError(f"`{path}` is not as {name} has it", f"apt-get install --reinstall {name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    shutil.copymode(path, target)


def _authorities(root: pathlib.Path) -> None:
    """All of Mozilla's authorities in one file, as ca-certificates makes it on a machine."""
    folder = root / "usr/share/ca-certificates/mozilla"
    bundle = root / _AUTHORITIES
    bundle.parent.mkdir(parents=True)
    bundle.write_bytes(b"".join(path.read_bytes().rstrip() + b"\n" for path in sorted(folder.glob("*.crt"))))
    shutil.rmtree(root / "usr/share/ca-certificates")
