"""Learn twenty programs and run each again: ``python -m tests.learn [PROGRAM ...]``. As root; about ten minutes.

One line a program: whether it ran again at the first try, and its grants beside those of a manifest by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from sandbox.layers import sources
from sandbox.layers.store import LayerStore
from tests.kernel import internet
from tests.kernel.session_kit import Home

PROGRAMS: Final = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
_PACKAGES = {"make": "make", "sqlite3": "sqlite3", "curl": "curl"}
_COPIED = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_SITE = "lib/python3.11/site-packages"
_WANTED, _RATIO = 18, 1.15


class Result(Struct, frozen=True):
    """The end of one program: what went wrong, empty for nothing, and the two sets of grants."""

    name: str
    wrong: str
    grants: tuple[str, ...] = ()
    minimal: tuple[str, ...] = ()


def _venv(place: Path) -> Path:
    """Make a virtual environment with pip and pytest, without a download."""
    made = place / "venv"
    subprocess.run(["/usr/bin/python3", "-m", "venv", made], check=True)
    shutil.copy(Path(sys.prefix) / _SITE / "py.py", made / _SITE)
    for name in _COPIED:
        shutil.copytree(Path(sys.prefix) / _SITE / name, made / _SITE / name)
    return made


def _npm(tree: Path) -> Path:
    """Copy this host's npm, which no package of the host has as it was installed."""
    module = Path(os.path.realpath("/usr/bin/npm")).parents[1]
    shutil.copytree(module, tree / module.relative_to("/"), symlinks=True)
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/npm").symlink_to(os.readlink("/usr/bin/npm"))
    return tree


@contextlib.contextmanager
def _world() -> Iterator[tuple[Home, Path, Mapping[str, str]]]:
    """Yield a home in an internet of its own, a place for the programs, and the words of their commands."""
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory(dir="/srv") as srv, internet.made() as net:
        place = Path(srv)
        place.chmod(0o755)
        home = Home(Path(base), "debian-minimal", "python3", "nodejs")
        home.world.configure(uplink="eth0", resolvers=[internet.RESOLVER])
        home.before = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{net.spaces['host']}"]
        store = LayerStore(home.world.state)
        for name, package in _PACKAGES.items():
            sources.build(store, name, ["host-packages", package])
        store.pack_tree(_npm(Path(base) / "npm"), "npm")
        venv = _venv(place)
        sources.build(store, "learn-venv", ["venv", str(venv)])
        ca = place / "ca.pem"
        ca.write_text(net.certificate)
        yield home, place, {"ca": str(ca), "venv": str(venv)}


def _grants(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the grants of a manifest as `minimal` writes them."""
    permissions = manifest.get("permissions", {})
    programs = permissions.get("executables", {}).get("allow", [])
    return (
        *permissions.get("filesystem", {}).get("read", []),
        *("workspace programs" if one == "workspace" else one for one in programs),
        *(f"{one['host']}:{one['ports'][0]}" for one in permissions.get("network", [])),
        *(["workspace"] if "workspace" in manifest else []),
        *(f"layer {one.partition('@')[0]}" for one in manifest["root"].get("layers", [])),
    )


def _tried(home: Home, place: Path, words: Mapping[str, str], name: str) -> Result:
    program, here = PROGRAMS[name], place / name

    def filled(texts: list[str]) -> list[str]:
        return [one.replace("{here}", str(here)).replace("{ca}", words["ca"]).replace("{venv}", words["venv"])
                for one in texts]  # fmt: skip

    here.mkdir(0o755)
    if "setup" in program:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(place), "LANG": "C.UTF-8"}
        subprocess.run(["/bin/sh", "-ec", program["setup"]], cwd=here, env=env, check=True)
    layers = [word for one in program.get("layers", []) for word in ("--layer", one)]
    role = ["--within", "operator-agent"] if program.get("net") else []
    target = home.base / f"learnt-{name}"
    options = [*layers, *role, *filled(program.get("options", []))]
    first = home.covenant("learn", "--workspace", here, "--to", target, *options, "--", *filled(program["command"]))
    if first.returncode or not target.exists():
        return Result(name, f"learn ended with {first.returncode}: {first.stderr.decode()[-600:]}")
    manifest = tomllib.loads((target / "agent.toml").read_text())
    given = ["--workspace", str(here)] if "workspace" in manifest else []
    again = home.covenant("dev", *given, target)
    wrong = ""
    if (again.returncode, again.stdout) != (0, first.stdout):
        said = again.stderr.decode()[-600:]
        wrong = f"ended with {again.returncode}: {again.stdout!r} and not {first.stdout!r}: {said}"
    return Result(name, wrong, _grants(manifest), tuple(filled(program["minimal"])))


def main() -> int:
    """Return 0 when enough programs run again with few enough grants."""
    names = sys.argv[1:] or list(PROGRAMS)
    found = []
    with _world() as (home, place, words):
        for name in names:
            one = _tried(home, place, words, name)
            found.append(one)
            mine, theirs = set(one.grants), set(one.minimal)
            print(f"{name:18} {'RED  ' if one.wrong else 'green'} {len(mine)} of {len(theirs)}", flush=True)
            if one.wrong or mine != theirs:
                print(f"    more {sorted(mine - theirs)}, fewer {sorted(theirs - mine)}\n    {one.wrong}", flush=True)
    green = [one for one in found if not one.wrong]
    learnt, by_hand = sum(len(one.grants) for one in green), sum(len(one.minimal) for one in green)
    print(f"{len(green)} of {len(found)} run again; {learnt} grants beside {by_hand} by hand")
    return int(len(green) < min(_WANTED, len(names)) or learnt > _RATIO * by_hand)


if __name__ == "__main__":
    sys.exit(main())
