"""Run in its own mount namespace: one run holds a written path, others ask for the same; prints the answers.

unshare --mount --propagation private python -m tests.kernel.one_writer BASE WARM
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from policy import errors
from tests.kernel.conftest import leftovers
from tests.kernel.world import HEAD, TAIL, World
from tests.kernel.written_image import PLACE, image

HOLD = """
import time
open("{at}/ready", "w").close()
while not os.path.exists("{at}/go"): time.sleep(0.02)
answer = "held"
"""
COUNT = """
import sqlite3
c = sqlite3.connect("{at}/count.db", timeout=30, isolation_level=None)
c.execute("create table if not exists t(n integer)")
answer = 0
while answer < 50:
    c.execute("begin immediate"); c.execute("insert into t values (1)"); c.execute("commit"); answer += 1
"""


def write(path: Path, *, shared: bool = False) -> str:
    return f'[permissions.filesystem]\nwrite = ["{path}"]\n' + ("shared = true\n" if shared else "")


def asked(world: World, code: str, path: Path, *, shared: bool = False) -> Any:
    try:
        return world.ask(code.format(at=path), filesystem="host", disk_mb=24, more=write(path, shared=shared))
    except errors.CovenantError as e:
        return f"{e.code}: {e}"


class Holder:
    """A run in a process of its own that holds a path until it is told to end."""

    def __init__(self, world: World, room: Path, *, shared: bool = False) -> None:
        self.room = room
        for name in ("ready", "go"):
            (room / name).unlink(missing_ok=True)
        package = world.sign(
            world.package(
                {"main.py": HEAD + HOLD.format(at=room) + TAIL},
                name="holder",
                id="holder",
                filesystem="host",
                disk_mb=24,
                more=write(room, shared=shared),
            )
        )
        self.process = multiprocessing.get_context("fork").Process(target=world.run, args=(package,))
        self.process.start()
        until = time.monotonic() + 60
        while not (room / "ready").exists():
            assert time.monotonic() < until, "the holder did not start"
            time.sleep(0.02)

    def end(self) -> None:
        (self.room / "go").touch()
        self.process.join()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def main(base: Path, warm: Path) -> dict[str, Any]:
    """Return the answer of every run."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "none", str(PLACE)], check=True)
    world = World(base, warm=warm)
    room = image(base, "room", "nosuid,nodev")
    other = PLACE / "other"
    other.mkdir(mode=0o755)
    subprocess.run(["mount", "--bind", str(room), str(other)], check=True)
    found: dict[str, Any] = {}
    holder = Holder(world, room)
    found["held"] = asked(world, COUNT, room)
    found["by another name"] = asked(world, COUNT, other)
    found["held from shared"] = asked(world, COUNT, room, shared=True)
    holder.end()
    found["free"] = asked(world, COUNT, room)
    holder = Holder(world, room)
    holder.kill()
    found["killed"] = asked(world, COUNT, other)
    holder = Holder(world, room, shared=True)
    found["shared"] = asked(world, COUNT, room, shared=True)
    found["alone beside shared"] = asked(world, COUNT, room)
    holder.end()
    found["leftovers"] = leftovers(world)
    for place in (other, room):
        subprocess.run(["umount", str(place)], check=True)
    return found


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1]), Path(sys.argv[2])), sys.stdout)
