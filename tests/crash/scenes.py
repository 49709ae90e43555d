"""The scenes of a crash campaign: a package in its own world, in every way in which a run can be made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.vault import keys
from sandbox.vault.embedded import FileVault
from tests.crash.server import Server
from tests.kernel import families, internet
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.world import HEAD, TAIL, World

GRANTS = internet.entries(("api.example.com", "[80]", "tcp"), ("www.example.com", "[443]", "tls"))
# Short, and with something of each kind: a file, a refused call, a moment in which it only waits.
WORK = "import time\nopen('/tmp/x', 'w').write('x' * 4096)\ntime.sleep(0.05)\nanswer = 1\n"
# By both ways: the file that was there before it, and the broker.
SECRET = "planted-secret-" + "s" * 64
GRANTED = '[permissions.credentials]\ngrants = ["db"]\nfiles = true\n'
READS = """
import socket, time
broker = socket.socket(fileno=3)
lines = broker.makefile("rb")
def ask(**fields):
    broker.sendall(json.dumps({"id": 1, **fields}).encode() + b"\\n")
    return json.loads(lines.readline())["ok"]
value = ask(kind="credential", name="db", token=ask(kind="token")["token"])["value"]
time.sleep(0.05)
answer = open(os.environ["CREDENTIALS_DIRECTORY"] + "/db").read() == value
"""
ASKS = internet.PROBES + "answer = [tcp('api.example.com', 80), tcp('10.8.8.8', 80)]\n"


@dataclass
class Scene:
    """One way to run: its world, the package that is run, where the network is, and what is done before each run."""

    name: str
    world: World
    package: Path
    internet: Internet | None = None
    user: str | None = None
    work: str = "run"
    before: Callable[[], None] = lambda: None
    foreign: list[str] = field(default_factory=list)
    home: Path | None = None
    root: str = ""
    ballast: str = ""
    secrets: tuple[bytes, ...] = ()

    @property
    def place(self) -> Path:
        """The home as the subjects name it: the world's, unless it was moved to a small disk."""
        return self.home or self.world.home

    @property
    def seen(self) -> Path:
        """The home as this process reaches it."""
        return Path(f"{self.root}{self.place}")

    @property
    def network(self) -> str:
        """A path of the network namespace that stands for the host; empty without one."""
        return "" if self.internet is None else f"/proc/{os.getpid()}/fd/{self.internet.spaces['host']}"


def _plain(base: Path, warm: Path | None) -> Scene:
    world = World(base, warm=warm)
    return Scene("plain", world, world.sign(world.package({"main.py": HEAD + WORK + TAIL})))


def _tested(base: Path, warm: Path | None) -> Scene:
    """The policy is tried before each run."""
    world = World(base, warm=warm)
    world.configure(self_test=True)
    scene = Scene("tested", world, world.sign(world.package({"main.py": HEAD + WORK + TAIL})))
    scene.before = lambda: (world.state / "closures" / "canaries.json").unlink(missing_ok=True)
    return scene


def _family(base: Path, warm: Path | None) -> Scene:
    """An agent that starts another one under a keeper of its own, and waits for it."""
    world = World(base, warm=warm)
    families.member(world, "child", WORK)
    parent = families.member(world, "parent", "answer = child('child')", more=families.spawn(), **families.BIG)
    return Scene("family", world, parent)


def _served(base: Path, warm: Path | None) -> Scene:
    """By a supervisor that forks a keeper for it, and that goes on when the keeper does not."""
    scene = _plain(base, warm)
    scene.name, scene.work = "served", "serve"
    return scene


def _standby(base: Path, warm: Path | None) -> Scene:
    """By a supervisor with an instance that waits, which is asked twice."""
    world = World(base, warm=warm)
    world.configure(journal=False, checkpoint_seconds=0)
    package = world.package({"main.py": HEAD + "answer = intent['text']\n" + TAIL})
    manifest = package / "agent.toml"
    manifest.write_text(manifest.read_text().replace("[sandbox]\n", "[sandbox]\nstandby = 1\n"))
    return Scene("standby", world, world.sign(package), work="standby")


def _secrets(base: Path, warm: Path | None) -> Scene:
    """An agent that has a secret as a file and asks for it as well."""
    world = World(base, warm=warm)
    key = base / "vault.key"
    keys.make_file(key)
    with (world.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{key}"\n')
    vault = FileVault(world.state, lambda: keys.configured(str(key)))
    with keys.configured(str(key)) as opener:
        vault.create([opener], before=lambda change: None)
    vault.put("probe", "db", memoryview(SECRET.encode()), before=lambda change: None)
    package = world.package({"main.py": HEAD + READS + TAIL}, more=GRANTED)
    return Scene("secrets", world, world.sign(package), secrets=(SECRET.encode(),))


def _local(base: Path, warm: Path | None) -> Scene:
    world = World(base, warm=warm)
    fields: dict[str, Any] = {"backend": "trusted-local", "required": "false"}
    package = world.package({"main.py": HEAD + "import time; time.sleep(0.05)\nanswer = 1" + TAIL}, **fields)
    return Scene("local", world, world.sign(package), user="covenant-agent")


def _networked(base: Path, warm: Path | None, net: Internet) -> Scene:
    world = internet.configured(NetworkedWorld(base, warm=warm), net)
    package = world.package({"main.py": HEAD + ASKS + TAIL}, network="full", more=GRANTS)
    return Scene("networked", world, world.sign(package), internet=net)


@contextlib.contextmanager
def on_a_small_disk(scene: Scene, place: Path, *, megabytes: int = 400) -> Iterator[Server]:
    """A server in a mount namespace of its own, in which a copy of the scene's home lies on a disk that can be full."""
    place.mkdir()
    script = 'mount -t tmpfs -o size="$1"m,mode=0700 none "$2"; cp -a "$3" "$2/home"; shift 3; exec "$@"'
    command = ["sh", "-ec", script, "sh", str(megabytes), str(place), str(scene.world.home)]
    with Server(["unshare", "--mount", "--propagation", "private", *command]) as server:
        server.settle()  # by its answer all of it is there
        scene.home, scene.root, scene.ballast = place / "home", server.root, str(place / "ballast")
        yield server


@contextlib.contextmanager
def made(base: Path, *names: str, warm: Path | None = None) -> Iterator[list[Scene]]:
    """The scenes of these names, each in a folder of its own."""
    makers: dict[str, Callable[[Path, Path | None], Scene]] = {
        "plain": _plain,
        "family": _family,
        "served": _served,
        "tested": _tested,
        "local": _local,
        "standby": _standby,
        "secrets": _secrets,
    }
    with contextlib.ExitStack() as stack:
        scenes = []
        for name in names:
            folder = base / name
            folder.mkdir()
            if name == "networked":
                scenes.append(_networked(folder, warm, stack.enter_context(internet.made())))
            else:
                scenes.append(makers[name](folder, warm))
        yield scenes


NAMES = ("plain", "family", "networked", "served", "tested", "local", "standby", "secrets")
