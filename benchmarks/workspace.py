#!/usr/bin/env python3
"""Measure a workspace: how soon its overlay is ready, and an apply beside `rsync -a` of the same files. As root.

    .venv/bin/python benchmarks/workspace.py [rounds]

    ready    from the open directory to the mounted overlay, for 10 and for 100,000 files, milliseconds; and of it the
             walk for masked files. "first": nothing is remembered of the directory (ADR 0131)
    image    of it the empty image: a copy of a template, beside mkfs.ext4 of the same size
    apply    of 1,000 changed files of 4 KiB, beside `rsync -a` of the upper layer to a copy of the directory

A figure is the median of all rounds, which take turns.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from msgspec import structs

from policy import data
from policy.workspace.changes import Terms
from sandbox.workspace import image, masks, operations, session, store
from sandbox.workspace.caller import CallerIdentity

OWNER, UID = 1000, 200_000
FILES = data.workspace_files()
TERMS = {"mask": sorted(FILES.mask), "protect": sorted(FILES.protect), "max_mb": 256, "apply": "ask", "below": ["/"]}
CHANGED = 1_000


def tree(top: Path, files: int) -> Path:
    """Make a directory with so many files, 50 in each directory."""
    for number in range(files):
        place = top / f"d{number // 50}"
        if number % 50 == 0:
            place.mkdir(parents=True)
        (place / f"f{number}.py").write_text("x" * 100)
    for path in (top, *top.rglob("*")):
        os.lchown(path, OWNER, OWNER)
    return top


def ready(base: Path, top: Path, number: int) -> tuple[float, float]:
    """Return the time to a mounted overlay, and of the walk alone, in milliseconds."""
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    given = session.GivenDirectory(fd, CallerIdentity(OWNER, OWNER))
    about = session.About(f"run{number}", "probe", "0" * 64, str(top))
    begin = time.perf_counter()
    with session.RunWorkspace(base, given, TERMS, about) as one:
        one.mounted(UID)
        took = time.perf_counter() - begin
    begin = time.perf_counter()
    masks.walk(fd, tuple(TERMS["mask"]), "", base / "workspaces" / store.LISTINGS)  # type: ignore[arg-type]
    walk = time.perf_counter() - begin
    os.close(fd)
    return took * 1e3, walk * 1e3


def first(base: Path, top: Path, number: int) -> tuple[float, float]:
    """Do as ``ready`` where nothing is remembered of the directory. The walk is measured alone."""
    shutil.rmtree(base / "workspaces" / store.LISTINGS, ignore_errors=True)
    took, _ = ready(base, top, number)
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    begin = time.perf_counter()
    masks.found(fd, tuple(TERMS["mask"]))  # type: ignore[arg-type]
    walk = time.perf_counter() - begin
    os.close(fd)
    return took, walk * 1e3


def made(base: Path, number: int) -> tuple[float, float]:
    """Return the time of an image copied from its template, and of one made by mkfs.ext4, in milliseconds."""
    places = [base / f"image{number}", base / f"formatted{number}"]
    times = []
    for place, templates in zip(
        places, (base / "workspaces" / store.TEMPLATES, base / f"templates{number}"), strict=True
    ):
        begin = time.perf_counter()
        image.create(place, int(str(TERMS["max_mb"])), templates)
        times.append((time.perf_counter() - begin) * 1e3)
    for place in places:
        place.unlink()
    return times[0], times[1]


def apply(base: Path, number: int) -> tuple[float, float]:
    """Return the time of an apply and of rsync, in milliseconds."""
    top, other = base / f"project{number}", base / f"copy{number}"
    for place in (top, other):
        tree(place, CHANGED)
    info = top.stat()
    made = store.place(base, f"apply{number}")
    made.make(
        store.WorkspaceRecord(
            run_id=f"apply{number}",
            agent_id="probe",
            policy_digest="0" * 64,
            directory=str(top),
            device=info.st_dev,
            inode=info.st_ino,
            caller=CallerIdentity(OWNER, OWNER),
            started_ns=time.time_ns() + 10**9,
            max_mb=256,
            apply="ask",
            terms=Terms(tuple(FILES.mask), tuple(FILES.protect)),
            settled=True,
        )
    )
    image.create(made.image, 256, base / "workspaces" / store.TEMPLATES)
    with image.AttachedImage(made.image) as attached:
        fd = attached.mounted()
        upper = Path(f"/proc/self/fd/{fd}/{image.UPPER}")
        upper.mkdir()
        for index in range(CHANGED):
            path = upper / f"d{index // 50}" / f"f{index}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(os.urandom(4096))
        for path in (upper, *upper.rglob("*")):
            os.chown(path, OWNER, OWNER)
        # rsync does not find its way into a detached mount.
        shutil.copytree(upper, base / f"set{number}", copy_function=shutil.copy)
        os.close(fd)
    for path in (base / f"set{number}").rglob("*"):
        os.chown(path, OWNER, OWNER)
    os.sync()
    begin = time.perf_counter()
    subprocess.run(["rsync", "-a", f"{base}/set{number}/", f"{other}/"], check=True)
    raw = time.perf_counter() - begin
    os.sync()
    made.write(structs.replace(made.record(), started_ns=time.time_ns() + 10**9))
    begin = time.perf_counter()
    with operations.opened(made) as one:
        done = one.apply(log=lambda changes: None)
    took = time.perf_counter() - begin
    assert len(done.applied) == CHANGED, (len(done.applied), done.left[:3])
    made.remove()
    return took * 1e3, raw * 1e3


def main() -> None:
    """Print a line a figure."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    base = Path(tempfile.mkdtemp(prefix="covenant-workspace-"))
    base.chmod(0o755)
    few, many = base / "few", base / "many"
    tree(few, 10)
    # In a process of its own: a large heap makes each fork slower, and no supervisor has one.
    making = multiprocessing.get_context("fork").Process(target=tree, args=(many, 100_000))
    making.start()
    making.join()
    ready(base, few, 0)
    starts: dict[str, list[tuple[float, float]]] = {"10": [], "100,000, first": [], "100,000": []}
    applies, images = [], []
    for number in range(1, rounds + 1):
        starts["10"].append(ready(base, few, 3 * number))
        starts["100,000, first"].append(first(base, many, 3 * number + 1))
        starts["100,000"].append(ready(base, many, 3 * number + 2))
        images.append(made(base, number))
        applies.append(apply(base, number))
    for name, found in starts.items():
        whole, walk = (statistics.median(one[part] for one in found) for part in (0, 1))
        least = min(one[0] for one in found)
        print(f"ready with {name} files: {whole:.0f} ms, least {least:.0f}, the walk for masked files {walk:.0f} ms")
    copied, formatted = (statistics.median(one[part] for one in images) for part in (0, 1))
    print(f"image of {TERMS['max_mb']} MiB: {copied:.1f} ms, mkfs.ext4 {formatted:.1f} ms")
    took, raw = (statistics.median(one[part] for one in applies) for part in (0, 1))
    ratios = [mine / theirs for mine, theirs in applies]
    ratio, least = statistics.median(ratios), min(ratios)
    print(
        f"apply of {CHANGED} changed files: {took:.0f} ms, rsync -a {raw:.0f} ms, ratio {ratio:.2f}, least {least:.2f}"
    )
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
