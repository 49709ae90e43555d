"""Workspaces of users in a test's state, made without a run: a record, and an image with changes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from policy.workspace.changes import Terms
from sandbox.workspace import image, store
from sandbox.workspace.caller import CallerIdentity

# The uid and gid of a directory's owner.
OWNER = 1000


def git(checkout: Path, *words: str) -> str:
    """Run git on the host as the owner of a checkout."""
    identity = ("-c", "user.name=owner", "-c", "user.email=owner@example.invalid")
    done = subprocess.run(
        ["git", *identity, *words],
        cwd=checkout,
        user=OWNER,
        group=OWNER,
        extra_groups=[],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def project(top: Path, name: str, uid: int) -> Path:
    """Make a directory of a user with one file."""
    made = top / name
    made.mkdir()
    (made / "in.txt").write_text("hello")
    for path in (made, made / "in.txt"):
        os.chown(path, uid, uid)
    return made


def add_files(upper: Path) -> None:
    """Leave a new file in a new directory, and one whose content steers a terminal."""
    (upper / "new").mkdir()
    (upper / "new" / "file").write_text("new\n")
    (upper / "shown").write_bytes(b"a\x1b[2Jb\n\xff")


def plant(
    state: Path,
    run_id: str,
    directory: Path,
    uid: int,
    *,
    change: Callable[[Path], None] = add_files,
    **fields: Any,
) -> store.WorkspaceDirectory:
    """Make the settled workspace of a run that ``uid`` asked for, on a directory of that user."""
    made, info = store.place(state, run_id), directory.stat()
    record = store.WorkspaceRecord(
        run_id=run_id,
        agent_id="probe",
        policy_digest="1" * 64,
        directory=str(directory),
        device=info.st_dev,
        inode=info.st_ino,
        caller=CallerIdentity(info.st_uid, info.st_gid),
        started_ns=2**62,
        max_mb=16,
        apply="ask",
        terms=Terms((), ()),
        settled=True,
        changes=3,
        uid=uid,
    )
    made.make(structs.replace(record, **fields))
    image.create(made.image, 16, state / "workspaces" / store.TEMPLATES)
    with image.AttachedImage(made.image) as attached:
        fd = attached.mounted()
        mounted = Path(f"/proc/self/fd/{fd}")
        for name in (image.UPPER, image.WORK, image.MASK):
            (mounted / name).mkdir()
        change(mounted / image.UPPER)
        os.close(fd)
    return made
