"""Undo: take back exactly what the record says that set-up added, newest kind first.

What was there before set-up is not in the record and is never touched. What others came to need in the
meantime (a package that something else depends on now) stays, and is named.
"""

from __future__ import annotations

import os
import pathlib
import pwd
import shutil

from scripts.machine import apt, console
from scripts.machine.console import SetupError
from scripts.machine.record import Record
from scripts.virtual import recipe


def take_back(clone: pathlib.Path) -> None:
    """Remove what the record lists, then the record.

    Raises:
        SetupError: root is needed, or something could not be removed; what is left stays in the record.
    """
    record = Record(clone)
    added = record.added
    if (added.packages or added.files or added.users) and os.geteuid() != 0:
        raise SetupError("root, since set-up added packages, files or users", "sudo ./scripts/undo")
    _images(record)
    _paths(clone, record)
    _users(record)
    _packages(record)
    _files(record)
    for line in added.upgraded:
        console.note(f"was upgraded on the way and stays so: {line}")
    left = [*added.packages, *added.files, *added.users, *added.paths]
    if left:
        console.note(f"still recorded in {record.path}: {' '.join(left)}")
        return
    if record.path.parent.exists():
        console.change(f"remove {record.path.parent}")
        shutil.rmtree(record.path.parent)


def _paths(clone: pathlib.Path, record: Record) -> None:
    for name in list(record.added.paths):
        path = clone / name
        # The record can be edited by hand: remove nothing outside the clone because of it.
        if ".." in pathlib.PurePath(name).parts or pathlib.PurePath(name).is_absolute() or not name:
            raise SetupError(f"the record names `{name}`, which is not inside the clone", f"look at {record.path}")
        if path.is_symlink() or path.is_file():
            console.change(f"remove {name}")
            path.unlink()
        elif path.is_dir():
            console.change(f"remove {name}/")
            shutil.rmtree(path)
        record.forget("paths", name)


def _images(record: Record) -> None:
    # They lie outside the clone, in a place that is computed: the record says only that there are some.
    if recipe.WORK in record.added.paths and recipe.cache().exists():
        console.change(f"remove {recipe.cache()}, the images of the virtual machine")
        shutil.rmtree(recipe.cache())


def _users(record: Record) -> None:
    for name in list(record.added.users):
        try:
            pwd.getpwnam(name)
        except KeyError:
            pass
        else:
            console.change(f"remove user {name}")
            console.run(["userdel", name])
        record.forget("users", name)


def _packages(record: Record) -> None:
    present = apt.installed()
    ours = [name for name in record.added.packages if name in present]
    if ours:
        others = sorted(set(apt.removal(ours)) - set(ours))
        if others:
            # `others` were installed after set-up. Removing them would not be taking back what set-up added.
            console.note(f"{' '.join(ours)} stay, because {' '.join(others)} need them now")
            return
        console.change(f"remove Debian packages: {' '.join(ours)}")
        apt.purge(ours)
    record.forget("packages", *list(record.added.packages))


def _files(record: Record) -> None:
    # In the order opposite to their making: a pin goes after the source that it guards.
    for name in reversed(list(record.added.files)):
        path = pathlib.Path(name)
        if path.exists():
            console.change(f"remove {name}")
            path.unlink()
            console.note("apt drops the lists of a removed source at its next `apt-get update`")
        record.forget("files", name)
