"""Run in its own mount namespace: makes images with file systems, grants them, and prints what an agent could do.

unshare --mount --propagation private python -m tests.kernel.written_image BASE WARM
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from policy import errors
from tests.kernel.conftest import leftovers
from tests.kernel.world import World

ROOM_MB = 16
PLACE = Path("/srv")  # a tmpfs of this namespace alone

CODE = """
import socket, stat
answer = {}
def tried(name, act):
    try: answer[name] = act() or "done"
    except OSError as e: answer[name] = e.errno
def opened(path, flags): os.close(os.open(path, flags, 0o644))
at = "/srv/room/"
tried("read", lambda: open(at + "text").read())
tried("change", lambda: open(at + "text", "a").write("x") and "")
tried("new", lambda: opened(at + "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
tried("unnamed", lambda: opened(at, os.O_TMPFILE | os.O_WRONLY))
tried("owners", lambda: opened(at + "owners", os.O_WRONLY))
tried("anothers", lambda: opened(at + "anothers", os.O_RDONLY))
tried("inner link", lambda: open(at + "link").read())
tried("outer link", lambda: open(at + "outside").read())
tried("setuid", lambda: os.chmod(at + "new", 0o4755))
tried("run it", lambda: os.execv(at + "program", ["program"]))
tried("device", lambda: os.mknod(at + "device", stat.S_IFBLK | 0o666, os.makedev(7, 0)))
tried("give away", lambda: os.chown(at + "new", 0, 0))
tried("rename out", lambda: os.rename(at + "new", "/tmp/new"))
tried("link out", lambda: os.link(at + "new", "/tmp/new"))
tried("uid", lambda: os.stat(at + "new").st_uid == os.getuid() and "mine")
tried("sparse", lambda: os.truncate(at + "new", 1 << 40))
scratch = os.statvfs("/tmp")
answer["scratch"] = scratch.f_blocks * scratch.f_frsize >> 20
def fill():
    with open(at + "full", "wb") as file:
        for n in range(64): file.write(bytes(1 << 20)), file.flush()
tried("fill", fill)
answer["filled"] = os.stat(at + "full").st_size >> 20
os.unlink(at + "full")
def many():
    os.mkdir(at + "many")
    for n in range(50000): opened(f"{at}many/{n}", os.O_CREAT | os.O_WRONLY)
tried("many", many)
"""
# How long four MiB take to be on the disk, in seconds.
TIMED = """
import time
begin = time.monotonic()
with open("/srv/room/timed", "wb") as file:
    file.write(bytes(4 << 20)), file.flush(), os.fsync(file.fileno())
os.unlink("/srv/room/timed")
answer = time.monotonic() - begin
"""


def image(base: Path, name: str, options: str, *, mb: int = ROOM_MB, parent: Path = PLACE) -> Path:
    """An ext4 of its own, mounted at ``parent/name`` through a loop device that goes with the mount."""
    file, place = base / f"{name}.img", parent / name
    with file.open("wb") as made:
        made.truncate(mb << 20)
    place.mkdir(mode=0o755)
    subprocess.run(["mkfs.ext4", "-q", str(file)], check=True)
    subprocess.run(["mount", "-o", f"loop,{options}", str(file), str(place)], check=True)
    return place


def furnish(room: Path) -> None:
    """Put in the files of an operator."""
    (room / "text").write_text("as it was")
    (room / "owners").write_text("the owner's")
    (room / "owners").chmod(0o600)
    (room / "anothers").write_text("another's")
    (room / "anothers").chmod(0o600)
    os.chown(room / "anothers", 12345, 12345)
    (room / "link").symlink_to("text")
    (room / "outside").symlink_to("/etc/hostname")
    (room / "program").write_text("#!/bin/true\n")
    (room / "program").chmod(0o755)


def main(base: Path, warm: Path) -> dict[str, Any]:
    """Return the result of every grant."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "none", str(PLACE)], check=True)
    world = World(base, warm=warm)
    room, open_ = image(base, "room", "nosuid,nodev"), image(base, "open", "nodev")
    furnish(room)
    (room / "below").mkdir(mode=0o755)

    def asked(path: Path, code: str = "answer = 1\n", disk_mb: int = 24, resources: str = "") -> Any:
        more = f'[permissions.filesystem]\nwrite = ["{path}"]\n'
        try:
            return world.ask(code, filesystem="host", disk_mb=disk_mb, more=more, resources=resources)
        except errors.CovenantError as e:
            return f"{e.code}: {e}"

    PLACE.joinpath("memory").mkdir(mode=0o755)
    found = {
        "memory": asked(PLACE / "memory"),
        "below": asked(room / "below"),
        "open": asked(open_),
        "large": asked(room, disk_mb=ROOM_MB),
        "any speed": asked(room, TIMED),
        "slow": asked(room, TIMED, resources=f"io_write_bps = {1 << 20}"),
        "room": asked(room, CODE),
        "leftovers": leftovers(world),
    }
    subprocess.run(["mount", "-o", "remount,nosuid,nodev", str(open_)], check=True)
    found["closed"] = asked(open_)
    kept = {name: (room / name).stat() for name in ("text", "new", "owners", "anothers")}
    found["on disk"] = {name: [info.st_uid, oct(info.st_mode)] for name, info in kept.items()}
    found["listed"] = sorted(path.name for path in room.iterdir())
    for place in (room, open_):
        subprocess.run(["umount", str(place)], check=True)
    return found


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1]), Path(sys.argv[2])), sys.stdout)
