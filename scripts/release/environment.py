"""The Python environment of a package: the packages of locks/server.txt and Covenant's wheel, below /opt/covenant."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import pathlib
import shutil

from scripts.machine import console
from scripts.machine.console import SetupError
from scripts.release.recipe import PYTHON, Source

PLACE = "/opt/covenant"
LOCK = "locks/package.txt"
# The environment of a server: the screens, and none of the extras that bring a model, a chain or another vault.
SERVER_LOCK = "locks/server.txt"
COMMANDS = ("covenant", "covenant-supervisor", "covenantd")
_HASHED = ("--require-hashes", "--no-deps", "--only-binary=:all:")
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "-q")


def tools(clone: pathlib.Path, work: pathlib.Path) -> pathlib.Path:
    """Make the environment of the tools that build packages, and return its `bin`.

    Raises:
        SetupError: pip could not get what the lock names.
    """
    venv = work / "tools"
    console.change(f"tools of {LOCK}, into a directory of this call")
    console.run([PYTHON, "-m", "venv", str(venv)])
    _install(venv / "bin/python", [], [*_HASHED, "-r", str(clone / LOCK)], LOCK)
    return venv / "bin"


@dataclasses.dataclass(frozen=True)
class Built:
    """Covenant's wheel, and the sources that it can be built from."""

    wheel: pathlib.Path
    sources: pathlib.Path


def build(source: Source, work: pathlib.Path, tools: pathlib.Path) -> Built:
    """Build Covenant's wheel and its sources from the files that git tracks.

    Raises:
        SetupError: git or the build failed.
    """
    copy, out = work / "source", work / "wheel"
    for name in source.files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source.clone / name, copy / name, follow_symlinks=False)
    project = copy / "pyproject.toml"
    project.write_text(project.read_text().replace(f'version = "{source.project}"', f'version = "{source.version}"', 1))
    console.change(f"build the wheel and the sources of version {source.version}")
    options = ["--wheel", "--sdist", "--no-isolation", "--outdir", str(out)]
    console.run([str(tools / "python"), "-m", "build", *options, str(copy)], env=source.environment)
    [wheel], [sources] = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sources)


def make(source: Source, work: pathlib.Path, tools: pathlib.Path, wheel: pathlib.Path) -> pathlib.Path:
    """Make the tree with the environment below /opt/covenant, and return its root.

    The environment is made in `work` and moved by its text: scripts and pyvenv.cfg name its final place. Its byte code
    is made here, by one process in one order: two calls give the same bytes, and dpkg can verify it.

    Raises:
        SetupError: pip could not get what the lock names, or a file still names the directory of this call.
    """
    root = work / "root"
    venv = root / PLACE.lstrip("/")
    console.change(f"the environment of {SERVER_LOCK}, and the wheel")
    console.run([PYTHON, "-m", "venv", "--without-pip", str(venv)])
    into = ["--python", str(venv / "bin/python")]
    _install(tools / "python", into, ["--no-compile", *_HASHED, "-r", str(source.clone / SERVER_LOCK)], SERVER_LOCK)
    # By its name: from a path pip would note the path.
    own = ["--no-compile", "--no-index", "--no-deps", "--find-links", str(wheel.parent)]
    _install(tools / "python", into, [*own, f"covenant-supervisor=={source.version}"], "the wheel")
    _settle(venv)
    _compile(source, venv, root)
    _check(venv, work)
    return root


def _install(python: pathlib.Path, into: list[str], what: list[str], name: str) -> None:
    try:
        console.run([str(python), *_PIP, *into, "install", *what], env={"PYTHONDONTWRITEBYTECODE": "1"})
    except SetupError as e:
        raise SetupError(
            f"the Python packages of {name}: {e}",
            "pip needs an index that it can reach (PIP_INDEX_URL or pip.conf); then call this again",
        ) from e


def _settle(venv: pathlib.Path) -> None:
    """Keep the interpreter and the three commands of `bin`, isolated, and name the final place in the text files."""
    for path in sorted((venv / "bin").iterdir()):
        if path.name in COMMANDS:
            first, rest = path.read_text().split("\n", 1)
            if not first.startswith("#!"):
                raise SetupError(f"`{path.name}` does not begin as pip writes it: `{first}`", "report this as a bug")
            # -I: what the commands import does not hang on PYTHONPATH or on where they are called.
            path.write_text(f"#!{PLACE}/bin/python -I\n{rest.removeprefix(_long_shebang(rest))}")
        elif not path.name.startswith("python"):
            path.unlink()
    for name in ("python", "python3"):
        (venv / "bin" / name).unlink(missing_ok=True)
    versioned = pathlib.Path(os.path.realpath(PYTHON))
    for name in ("python", "python3", versioned.name):
        (venv / "bin" / name).unlink(missing_ok=True)
        (venv / "bin" / name).symlink_to(f"/usr/bin/{versioned.name}")
    settings = venv / "pyvenv.cfg"
    kept = [line for line in settings.read_text().splitlines() if not line.startswith("command")]
    settings.write_text("\n".join(kept) + "\n")
    for path in sorted(venv.rglob("__pycache__"), reverse=True):
        shutil.rmtree(path)
    for path in venv.rglob("*.dist-info/RECORD"):
        _record(path)
    link = venv / "lib64"
    if link.is_symlink():
        link.unlink()
        link.symlink_to("lib")


def _record(path: pathlib.Path) -> None:
    """Write anew what a record of pip says of `bin`: programs that are gone leave it, and the rest have new digests."""
    kept = []
    for entry in path.read_text().splitlines():
        line = entry
        name = line.split(",")[0]
        program = (path.parent.parent / name).resolve() if name.startswith("../") else None
        if program is not None and program.is_file():
            content = program.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            line = f"{name},sha256={digest},{len(content)}"
        if program is None or program.is_file():
            kept.append(line)
    path.write_text("\n".join(kept) + "\n")


def _long_shebang(rest: str) -> str:
    """The lines that pip adds where the interpreter's path is too long for a first line."""
    lines = rest.split("\n", 2)
    return "\n".join(lines[:2]) + "\n" if lines[0].startswith("'''exec'") else ""


def _compile(source: Source, venv: pathlib.Path, root: pathlib.Path) -> None:
    """Compile each module but tests of others. The byte code names its final place, and holds without a look at the
    time of its source, which is the same for all files of a package."""
    options = ["-q", "-f", "--invalidation-mode", "unchecked-hash", "-x", "/tests/", "-s", str(root), "-p", "/"]
    console.run([PYTHON, "-IB", "-m", "compileall", *options, str(venv / "lib")], env=source.environment)


def _check(venv: pathlib.Path, work: pathlib.Path) -> None:
    wanted = os.fsencode(work)
    for path in venv.rglob("*"):
        if path.is_file() and not path.is_symlink() and wanted in path.read_bytes():
            raise SetupError(
                f"`{path.relative_to(venv)}` names the directory that it was made in", "report this as a bug"
            )
