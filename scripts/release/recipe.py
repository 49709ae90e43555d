"""Describe a package: its name, needs and scripts. nfpm packs a .deb and an .rpm by this one recipe."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import tomllib

from scripts.machine import console
from scripts.machine.console import SetupError

FORMATS = ("deb", "rpm")
# The distribution's own: the environment of the package has no interpreter in it.
PYTHON = "/usr/bin/python3"
# The project has no address for mail.
MAINTAINER = "The Covenant authors <covenant@localhost>"
_DEBIAN = ("nftables", "iproute2", "libseccomp2", "erofs-utils", "e2fsprogs", "libc6 (>= 2.34)", "python3")
_RPM = ("nftables", "iproute", "libseccomp", "erofs-utils", "e2fsprogs")


@dataclasses.dataclass(frozen=True)
class Source:
    """The clone that a package is made of: its tracked files, both versions, and the second of its commit."""

    clone: pathlib.Path
    files: tuple[str, ...]
    project: str
    version: str
    epoch: int

    @property
    def environment(self) -> dict[str, str]:
        """Return what makes a build repeatable: times of files, order of sets, language of messages."""
        return {"SOURCE_DATE_EPOCH": str(self.epoch), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"}


def read(clone: pathlib.Path, *, version: str | None = None) -> Source:
    """Return what `clone` holds: the files of the index, as they lie in the work tree.

    Raises:
        SetupError: it is no clone made by git.
    """
    listed = _git(clone, "ls-files", "-z")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _git(clone, "log", "-1", "--format=%ct"))
    project = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["version"]
    files = tuple(name for name in listed.split("\0") if name and (clone / name).is_file())
    return Source(clone, files, project, version or project, epoch)


def _git(clone: pathlib.Path, *command: str) -> str:
    # Under sudo the clone may belong to another user; the command line may say that it is safe.
    done = subprocess.run(["git", "-c", "safe.directory=*", *command], cwd=clone, capture_output=True, text=True)
    if done.returncode != 0:
        raise SetupError(f"git in {clone}: {done.stderr.strip()}", "use a clone made by git")
    return done.stdout


def pack(source: Source, tree: pathlib.Path, tools: pathlib.Path, out: pathlib.Path, kind: str) -> pathlib.Path:
    """Pack `tree` as `kind`, and return the file.

    Raises:
        SetupError: nfpm refused.
    """
    work = tree.parent
    settings = work / f"{kind}.json"
    scripts = _scripts(source, work)
    settings.write_text(json.dumps(describe(source, tree, scripts, kind), indent=1))
    target = out / name(source, kind)
    target.unlink(missing_ok=True)
    console.change(f"pack {target.name}")
    command = [str(tools / "nfpm"), "package", "-f", str(settings), "-p", kind, "-t", str(target)]
    console.run(command, env=source.environment)
    return target


def name(source: Source, kind: str) -> str:
    """Return the file's name, as the distributions write it."""
    return f"covenant_{source.version}_amd64.deb" if kind == "deb" else f"covenant-{source.version}-1.x86_64.rpm"


def describe(source: Source, tree: pathlib.Path, scripts: dict[str, str], kind: str) -> dict[str, object]:
    """Return nfpm's description of the package, a mapping of its configuration file."""
    python = pathlib.Path(os.path.realpath(PYTHON)).name
    needs = [python, *(_DEBIAN if kind == "deb" else _RPM)]
    return {
        "name": "covenant",
        "arch": "amd64",
        "platform": "linux",
        "version": source.version,
        "version_schema": "none",
        "release": "" if kind == "deb" else "1",
        "section": "admin",
        "priority": "optional",
        "maintainer": MAINTAINER,
        "description": "supervisor that runs AI agents, each held to one signed manifest\n"
        "Covenant runs an agent, or any command, under gVisor. One signed file says\n"
        "what the agent may do, and the kernel holds it to that file: system call\n"
        "filter, cgroups, namespaces, firewall. It needs a runsc, gVisor's program.",
        "homepage": "",
        "license": "Apache-2.0",
        "depends": needs,
        "mtime": _time(source.epoch),
        "scripts": scripts,
        "contents": [*_contents(source, tree, kind)],
        # lintian of Debian 12 cannot read zstd, and nfpm compresses by xz at 4 MB a second.
        "deb": {"compression": "gzip"},
        "rpm": {
            "compression": "zstd",
            "buildhost": "localhost",
            "group": "System Environment/Daemons",
            "summary": "Runs AI agents, each held to a manifest",
        },
    }


def _contents(source: Source, tree: pathlib.Path, kind: str) -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    # rpm keeps a list of the documents; to dpkg their place says it.
    documents = ("/usr/share/doc/", "/usr/share/man/") if kind == "rpm" else ()
    time = _time(source.epoch)
    for path in sorted(tree.rglob("*")):
        place = "/" + str(path.relative_to(tree))
        if path.is_symlink():
            made.append({"src": os.readlink(path), "dst": place, "type": "symlink"})
        elif path.is_file():
            info = {"mode": 0o755 if _is_program(place) else 0o644, "mtime": time}
            entry = "config|noreplace" if place.startswith("/etc/") else "doc" if place.startswith(documents) else ""
            made.append({"src": str(path), "dst": place, "type": entry, "file_info": info})
        elif place.startswith(("/opt/covenant", "/usr/share/doc/covenant", "/etc/covenant")):
            made.append({"dst": place, "type": "dir", "file_info": {"mode": 0o755, "mtime": time}})
    return made


def _is_program(place: str) -> bool:
    """Answer whether the file is started by its path; a library that pip made executable is not."""
    return place.startswith("/opt/covenant/bin/") or place.endswith("/sandbox/kernel/proc/covenant-start")


def _time(epoch: int) -> str:
    return datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _scripts(source: Source, work: pathlib.Path) -> dict[str, str]:
    """The four scripts of packaging/scripts with this version in them, where nfpm finds them."""
    made = {}
    for step in ("preinstall", "postinstall", "preremove", "postremove"):
        path = work / f"{step}.sh"
        text = (source.clone / "packaging/scripts" / f"{step}.sh").read_text()
        path.write_text(text.replace("@VERSION@", source.version))
        path.chmod(0o755)
        made[step] = str(path)
    return made
