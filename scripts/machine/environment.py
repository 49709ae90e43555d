"""The virtual environment: made from the lock, with the index that the machine is set to."""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil

from scripts.machine import console
from scripts.machine.console import SetupError
from scripts.machine.where import PYTHON, Machine

VENV = ".venv"
LOCK = pathlib.Path("locks/dev.txt")


def digest(clone: pathlib.Path) -> str:
    """Return the digest of the environment's sources: lock, project table, interpreter and place of the clone."""
    import tomllib  # here, so that an older python is told by step (1) and not by a traceback

    project = tomllib.loads((clone / "pyproject.toml").read_text())
    parts = [
        (clone / LOCK).read_bytes(),
        repr((project["project"], project["build-system"], project["tool"]["hatch"])).encode(),
        console.quiet([PYTHON, "-VV"])[1].encode(),
        os.fsencode(clone),
    ]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def provide(machine: Machine) -> None:
    """Step (5) of set-up: the environment is exactly what the lock says, or is made anew.

    Raises:
        SetupError: pip could not get or build something, or an environment of the owner's is in the way.
    """
    # pip checks every archive against the lock; which index it asks is the machine's own setting.
    venv = machine.clone / VENV
    stamp = venv / "covenant-lock.sha256"
    wanted = digest(machine.clone)
    if stamp.is_file() and stamp.read_text() == wanted:
        console.ok(f"{VENV} is what {LOCK} says")
        return
    if venv.exists():
        if VENV not in machine.record.added.paths:
            raise SetupError(
                f"`{venv}` was not made by set-up, so it is left as it is",
                f"rm -r {venv}, then run set-up again",
            )
        console.change(f"remove {VENV}, made from another lock or not finished")
        shutil.rmtree(venv)
    console.change(f"make {VENV} and install {LOCK} with its hashes")
    machine.record.add("paths", VENV)
    # Without pip's cache: it lies in the home of the caller, where undo would have to look for it.
    options = ["--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    pip = [str(venv / "bin/python"), "-m", "pip", *options, "install", "-q"]
    console.run([PYTHON, "-m", "venv", str(venv)])
    hashes = ["--require-hashes", "--no-deps", "--only-binary=:all:"]
    try:
        console.run([*pip, *hashes, "-r", str(machine.clone / LOCK)])
    except SetupError as e:
        raise SetupError(
            f"the Python packages of {LOCK}: {e}",
            "pip needs an index that it can reach (PIP_INDEX_URL or pip.conf); then run set-up again",
        ) from e
    # hatchling is in the lock: the project itself is built without an index.
    local = ["--no-index", "--no-deps", "--no-build-isolation", "-e", str(machine.clone)]
    console.run([*pip, *local], env={"PYTHONDONTWRITEBYTECODE": "1"})
    for name in ("covenant", "covenant-supervisor", "covenantd"):
        _isolate(venv / "bin" / name)
    stamp.write_text(wanted)


def _isolate(script: pathlib.Path) -> None:
    """They run as root, or hold a home's keys: what they import may not hang on PYTHONPATH, PYTHONHOME or where they
    were called."""
    first, rest = script.read_text().split("\n", 1)
    if not first.startswith("#!") or " " in first:
        raise SetupError(f"the first line of `{script}` is not as pip writes it: `{first}`", "report this as a bug")
    script.write_text(f"{first} -I\n{rest}")
