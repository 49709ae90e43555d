#!/usr/bin/env python3
"""Measure a program inside a sandbox of ours, in plain runsc of the same root, and on the bare host, in turns; as root.

    .venv/bin/python benchmarks/inside.py [rounds] [ROW...]

Each round runs one program in every place: the bare host, runsc with default flags and no filter, limit or log over the
same root directory, and our runs with ``cpu_millis`` 1000 and 2000. A row is one kind of work, and its figure the
median of all rounds in milliseconds, with the median ratio to plain runsc of the same round.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import run_hello
from sandbox.kernel import libc
from sandbox.kernel.runsc import command as runsc_command
from sandbox.storage import package_reader
from sandbox.supervisor import Request, Supervisor
from tests.kernel.world import World

# The name of the program of the measurement, and what it measures. ``scratch`` is a tmpfs, ``tree`` a checkout of git.
WORK = r"""
import hashlib, importlib, json, os, subprocess, sys, threading, time
order = json.loads(sys.stdin.readline()).get("text", "")
wanted, scratch, tree = json.loads(order)
library = os.path.dirname(os.__file__)
modules = "asyncio argparse csv dataclasses decimal email.message http.client logging sqlite3 ssl tarfile unittest " \
    "urllib.request xml.etree.ElementTree zipfile".split()
listed = [os.path.join(at, name) for at, _, names in os.walk(library) for name in names][:1500]
def imports():
    for name in modules:
        importlib.import_module(name)
def walk():
    for _ in range(2):
        for at, _, names in os.walk(library):
            for name in names:
                os.stat(os.path.join(at, name))
def read():
    for path in listed:
        with open(path, "rb") as file:
            file.read()
def tmpfs():
    for at in range(1000):
        with open(f"{scratch}/file-{at}", "wb") as file:
            file.write(b"x" * 4096)
    for at in range(1000):
        os.unlink(f"{scratch}/file-{at}")
def pipe():
    there, here = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        while os.read(there[0], 1) == b"x":
            os.write(here[1], b"x")
        os._exit(0)
    for _ in range(5000):
        os.write(there[1], b"x")
        os.read(here[0], 1)
    os.write(there[1], b"q")
    os.waitpid(child, 0)
def calls():
    for _ in range(100000):
        os.getppid()
def threads():
    for _ in range(300):
        one = threading.Thread(target=int)
        one.start()
        one.join()
def forks():
    for _ in range(50):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
def hashing():
    block = bytes(1 << 20)
    for _ in range(100):
        hashlib.sha256(block).digest()
def git():
    command = ["/usr/bin/git", "-c", "safe.directory=*", "--no-optional-locks", "-C", tree]
    subprocess.run([*command, "status", "--porcelain"], check=True, stdout=subprocess.DEVNULL)
took = {}
for row in (imports, walk, read, tmpfs, pipe, calls, threads, forks, hashing, git):
    if (wanted and row.__name__ not in wanted) or (row is git and not tree):
        continue
    begin = time.perf_counter()
    row()
    took[row.__name__] = (time.perf_counter() - begin) * 1000
print(json.dumps({"text": json.dumps(took)}))
"""
FILES = 10_000
OURS = (1000, 2000)


def checkout(tree: Path) -> None:
    """A git checkout of ``FILES`` files with one commit."""
    for at in range(FILES):
        path = tree / f"d{at // 100}" / f"f{at}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"%d\n" % at)
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", "-C", tree, *words], check=True)


def plain(kept: dict[str, Path], intent: bytes, index: int) -> dict[str, float]:
    """The same first process in the same root, by runsc with its default flags and nothing of ours."""
    bundle = kept["bundle"]
    config = json.loads((bundle / "config.json").read_text())
    for name in ("seccomp", "resources"):
        config["linux"].pop(name, None)
    (bundle / "config.json").write_text(json.dumps(config))
    state = bundle.parent / "raw-state"
    state.mkdir(exist_ok=True)
    # Its cgroups are not ours to make, and the overlay would write beside the root.
    command = ["/usr/bin/runsc", f"--root={state}", "--network=none", "--ignore-cgroups", "--overlay2=none", "run"]
    done = subprocess.run(
        [*command, f"--bundle={bundle}", f"plain{index}"],
        input=intent, capture_output=True, env=runsc_command.ENVIRONMENT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done
    return dict(json.loads(json.loads(done.stdout)["text"]))


def bare(program: Path, order: list[Any]) -> dict[str, float]:
    """The program on the host."""
    intent = json.dumps({"text": json.dumps(order)}).encode() + b"\n"
    done = subprocess.run(["/usr/bin/python3", "-I", program], input=intent, capture_output=True, timeout=300)
    assert done.returncode == 0, done
    return dict(json.loads(json.loads(done.stdout)["text"]))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    wanted = sys.argv[2:]
    base = Path(tempfile.mkdtemp(prefix="covenant-benchmark-"))
    # A granted path lies in no directory that others may write to, as /tmp is.
    tree = Path(tempfile.mkdtemp(prefix="covenant-benchmark-", dir="/srv")) if shutil.which("git") else None
    scratch = Path(tempfile.mkdtemp(prefix="covenant-benchmark-", dir="/dev/shm"))
    libc.private_mounts()
    try:
        measure(base, rounds, wanted, tree, scratch)
    finally:
        for path in (base, scratch, *([tree] if tree else [])):
            shutil.rmtree(path)


def measure(base: Path, rounds: int, wanted: list[str], tree: Path | None, scratch: Path) -> None:
    more = ""
    if tree is not None and (not wanted or "git" in wanted):
        tree.chmod(0o755)
        checkout(tree)
        more = f'[permissions.filesystem]\nread = ["{tree}"]\n[permissions.executables]\nallow = ["/usr/bin/git"]\n'
    else:
        tree = None
    order = [wanted, "/tmp", str(tree) if tree else ""]
    world = World(base)
    packages = {}
    for millis in OURS:
        fields = {"memory_mb": 512, "disk_mb": 64, "cpu_ms": 300_000, "resources": f"cpu_millis = {millis}"}
        package = world.package({"main.py": WORK}, name=f"inside{millis}", id=f"inside{millis}", more=more, **fields)
        packages[millis] = world.sign(package)
    found: dict[str, list[dict[str, float]]] = {}
    flags: dict[str, str] = {}
    with Supervisor(world.state) as supervisor, run_hello.captured(world, flags) as kept:
        places: tuple[str, ...] = ()
        for index in range(rounds + 1):
            turn: dict[str, dict[str, float]] = {}
            for millis, package in packages.items():
                answer = supervisor.run(Request(package_reader.read(package), json.dumps(order), world.issuer))
                assert answer.error is None, (answer.error, answer.stderr)
                assert answer.result is not None
                turn[f"ours {millis}"] = json.loads(answer.result.text)
            if index == 0:
                places = ("rootfs", *(name for name in kept if name.startswith("mounts/")))
                for place in places:
                    libc.mount(str(kept[place]), str(kept["bundle"] / place), flags=libc.MS_BIND)
            turn["plain"] = plain(kept, json.dumps({"text": json.dumps(order)}).encode() + b"\n", index)
            turn["bare"] = bare(packages[OURS[0]] / "main.py", [wanted, str(scratch), order[2]])
            # The first round fills caches.
            for name, took in turn.items() if index else ():
                found.setdefault(name, []).append(took)
        for place in places:
            libc.umount2(str(kept["bundle"] / place), libc.MNT_DETACH)
    report(found)


def report(found: dict[str, list[dict[str, float]]]) -> None:
    """A table: medians in milliseconds, and the median of the ratios to plain runsc round by round."""
    columns = ["bare", "plain", *(f"ours {millis}" for millis in OURS)]
    print(f"{'row':9}" + "".join(f"{name + ' ms':>14}{'':8}" for name in columns))
    for row in found["plain"][0]:
        line = f"{row:9}"
        for name in columns:
            pairs = zip(found[name], found["plain"], strict=True)
            ratio = statistics.median(mine[row] / theirs[row] for mine, theirs in pairs)
            line += f"{statistics.median(took[row] for took in found[name]):14.1f}  ({ratio:4.2f})"
        print(line)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
