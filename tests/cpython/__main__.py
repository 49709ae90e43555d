"""Run 150 modules of CPython's tests in a session and in plain runsc: ``python -m tests.cpython [MODULE...]``. As root.

Debian's libpython3.11-testsuite is a layer of the session. Plain runsc has its default flags, the same layers as its
root, the session's user, a tmpfs and no filter. Each module has a process and a time limit of its own; one that reaches
the limit is ended, and counts as none of its tests. Exit status 1 below 98 % of what passes there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from policy.layers import parse_ref
from sandbox.layers.images import RootImages
from tests.cpython import results
from tests.kernel import plain_runsc, skeleton_runsc
from tests.kernel.world import ROOT

MODULES = Path(__file__).with_name("modules.txt")
_LAYERS = {"debian-minimal": (), "python3": (), "cpython-tests": ("deb", "libpython3.11-testsuite")}
_SECONDS = 7200
_MODULE_SECONDS = 400
# A user without a name on most hosts, as a run's.
_UID = 20_000


def main() -> int:
    """Return 0 when enough passed."""
    modules = sys.argv[1:] or MODULES.read_text().split()
    script = _script(modules)
    with tempfile.TemporaryDirectory(prefix="covenant-cpython-") as directory:
        home = Path(directory)
        refs = [_layer(home, name, source) for name, source in _LAYERS.items()]
        ours = results.passed(_session(home, script))
        plain = results.passed(_plain(home, refs, script))
    share = results.ratio(ours, plain)
    print(f"{len(plain)} tests pass in plain runsc; {share:.2%} of them in a session (goal {results.GOAL:.0%})")
    for module, count in results.lost(ours, plain):
        print(f"  test_{module}: {count} do not")
    return int(share < results.GOAL)


def _script(modules: Sequence[str]) -> str:
    """Shell text that runs the modules two at a time, and prints their JUnit files."""
    test = f"timeout -k 5 {_MODULE_SECONDS} python3 -m test --junit-xml /tmp/junit/$0.xml test_$0"
    words = " ".join(modules)
    lines = (
        "mkdir /tmp/junit",
        f"printf '%s\\n' {words} | xargs -P2 -I{{}} sh -c '{test} </dev/null >&2; echo $0: $? >&2' {{}}",
        f"for one in /tmp/junit/*.xml; do echo '{results.MARK}'; cat $one; done",
    )
    return "\n".join(lines)


def _covenant(home: Path, *words: str) -> bytes:
    environment = {**os.environ, "COVENANT_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=_SECONDS, check=True)
    return done.stdout


def _layer(home: Path, name: str, source: tuple[str, ...]) -> str:
    return _covenant(home, "layer", "build", name, *source).decode().strip()


def _session(home: Path, script: str) -> bytes:
    words = ("exec", "--profile", "python", "--layer", "cpython-tests", "--no-tty", "--quiet", "--", "sh", "-c", script)
    return _covenant(home, *words)


def _plain(home: Path, refs: list[str], script: str) -> bytes:
    """The same script in plain runsc; the root is a directory of the same layers."""
    with contextlib.ExitStack() as stack:
        images = RootImages(home / "supervisor")
        layers = [parse_ref(ref) for ref in refs]
        held = stack.enter_context(images.hold([], layers, executable=["root"], points=skeleton_runsc.MOUNT_POINTS))
        bundle = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cpython-")))
        document = skeleton_runsc.bundle_config(held.root, ["/bin/sh", "-c", script], uid=_UID, scratch=["mode=1777"])
        document["process"]["env"].append("PYTHONDONTWRITEBYTECODE=1")
        document["hostname"] = "agent"
        (bundle / "config.json").write_text(json.dumps(document))
        command = [plain_runsc.find_runsc(), f"--root={bundle}/state", "--network=none", "--ignore-cgroups"]
        done = subprocess.run(
            [*command, "--overlay2=none", "run", f"--bundle={bundle}", f"cpython-{os.getpid()}"],
            stdout=subprocess.PIPE,
            timeout=_SECONDS,
            check=True,
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
