#!/usr/bin/env python3
"""Measure work in a workspace beside plain runsc with the same root and the same directory, in turns; as root.

    .venv/bin/python benchmarks/workspace_inside.py [rounds] [C files]

    status   `git status` in a repository of 10,000 files, warm: the median of 5 in one sandbox
    build    `make` of a project of 1,000 C files, from nothing

Plain runsc has the directory as a bind mount that it alone uses (`--file-access-mounts=exclusive`), for writing. gcc,
git and make come from this host (`covenant layer build tools host-packages gcc git make`). A figure is the median of
all rounds in milliseconds, with the median ratio of the rounds.
"""

from __future__ import annotations

import json
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

from policy.layers import parse_ref
from sandbox.layers.images import RootImages
from tests.kernel import plain_runsc, skeleton_runsc

OWNER, FILES, PLACE = 1000, 10_000, "/project"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
STATUS = """
git config --global safe.directory '*'
git status --porcelain
for i in 1 2 3 4 5; do b=$(date +%s%N); git status --porcelain; e=$(date +%s%N); echo $(( (e - b) / 1000 )); done
"""
BUILD = "b=$(date +%s%N); make -s -j2 >&2; e=$(date +%s%N); echo $(( (e - b) / 1000 )); make -s clean"


def owned(top: Path) -> Path:
    """Give all of a directory to the owner."""
    for path in (top, *top.rglob("*")):
        os.lchown(path, OWNER, OWNER)
    return top


def repository(top: Path) -> Path:
    """Make a repository with one commit of many files."""
    for number in range(FILES):
        place = top / f"d{number // 50}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"f{number}.py").write_text("x" * 100)
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "first")):
        subprocess.run(["git", *words], cwd=top, env=ENVIRONMENT, check=True)
    return owned(top)


def project(top: Path, files: int) -> Path:
    """Make a C project: each file includes a header, and is an object of one library."""
    top.mkdir()
    (top / "all.h").write_text("".join(f"int f{number}(int);\n" for number in range(files)))
    for number in range(files):
        body = f'#include "all.h"\nint f{number}(int x) {{ return x * {number} + f{(number + 1) % files}(x - 1); }}\n'
        (top / f"f{number}.c").write_text(body)
    rule = "OBJECTS = $(patsubst %.c,%.o,$(wildcard *.c))\nall: lib.a\nlib.a: $(OBJECTS)\n\tar rc $@ $^\n"
    (top / "Makefile").write_text(f"{rule}%.o: %.c all.h\n\tgcc -O1 -c -o $@ $<\nclean:\n\trm -f *.o lib.a\n")
    return owned(top)


def ours(home: Path, refs: list[str], top: Path, script: str) -> float:
    """Return the median that the script prints in a workspace, in milliseconds."""
    layers = [word for ref in refs[1:] for word in ("--layer", ref)]
    command = [sys.executable, "-m", "covenant", "exec", "--quiet", "--workspace", str(top), *layers]
    environment = {**os.environ, "COVENANT_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--", "bash", "-c", script], env=environment, capture_output=True, check=False)
    return printed(done)


def plain(root: Path, top: Path, script: str) -> float:
    """The same in plain runsc."""
    with tempfile.TemporaryDirectory(prefix="workspace-") as folder:
        document = skeleton_runsc.bundle_config(root, ["/bin/bash", "-c", script], uid=OWNER, scratch=["mode=1777"])
        document["process"]["cwd"] = PLACE
        document["mounts"].append(
            {"destination": PLACE, "type": "bind", "source": str(top), "options": ["rbind", "rw"]}
        )
        Path(folder, "config.json").write_text(json.dumps(document))
        runsc = [plain_runsc.find_runsc(), f"--root={folder}/state", "--network=none", "--ignore-cgroups"]
        flags = ["--overlay2=none", "--file-access-mounts=exclusive", "run", f"--bundle={folder}"]
        done = subprocess.run([*runsc, *flags, f"inside-{time.monotonic_ns()}"], capture_output=True, check=False)
    return printed(done)


def printed(done: subprocess.CompletedProcess[bytes]) -> float:
    """Return the median of the microseconds on stdout, in milliseconds."""
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return statistics.median(map(float, done.stdout.split())) / 1e3


def main() -> None:
    """Print a line a figure."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    files = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000
    base = Path(tempfile.mkdtemp(prefix="covenant-benchmark-", dir="/srv"))
    base.chmod(0o755)
    try:
        measure(base, rounds, files)
    finally:
        shutil.rmtree(base)


def measure(base: Path, rounds: int, files: int) -> None:
    """Print the figures of a repository and of a project below a directory."""
    home, refs = base / "home", []
    for words in (("debian-minimal",), ("tools", "host-packages", "gcc", "git", "make")):
        command = [sys.executable, "-m", "covenant", "layer", "build", *words]
        environment = {**os.environ, "COVENANT_HOME": str(home), "PYTHONPATH": str(ROOT)}
        refs.append(subprocess.run(command, env=environment, capture_output=True, check=True).stdout.decode().strip())
    tops = {"status": (repository(base / "repository"), STATUS), "build": (project(base / "c", files), BUILD)}
    points = [*skeleton_runsc.MOUNT_POINTS, (PLACE, "dir")]
    with RootImages(home / "supervisor").hold(
        [], list(map(parse_ref, refs)), executable=["root"], points=points
    ) as held:
        for name, (top, script) in tops.items():
            found = [(ours(home, refs, top, script), plain(held.root, top, script)) for _ in range(rounds)]
            mine, raw = (statistics.median(one[at] for one in found) for at in (0, 1))
            ratios = [one[0] / one[1] for one in found]
            ratio, least = statistics.median(ratios), min(ratios)
            print(f"{name}: {mine:.0f} ms, plain runsc {raw:.0f} ms, ratio {ratio:.2f}, least {least:.2f}", flush=True)


if __name__ == "__main__":
    main()
