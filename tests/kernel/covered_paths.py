"""Run in its own mount namespace: grants paths that mounts cover, and prints what an agent reads there.

unshare --mount --propagation private python -m tests.kernel.covered_paths BASE WARM
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policy import errors
from sandbox.rootfs import covered
from sandbox.runner import mounts
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import Live, live
from tests.kernel.world import World
from tests.kernel.written_image import image

PLACE = Path("/srv")  # a tmpfs of this namespace alone
DOCS = PLACE / "docs"
READS = """
answer = {}
for path in ("/srv/docs/page", "/srv/docs/inner/page", "/srv/docs/room/page"):
    try: answer[path] = open(path).read()
    except OSError as e: answer[path] = e.errno
"""


def lay(directory: Path, word: str) -> None:
    """Two pages, one of them in a directory of its own."""
    for place in (directory, directory / "inner"):
        place.mkdir(mode=0o755, exist_ok=True)
        (place / "page").write_text(word)


@contextlib.contextmanager
def mounted(*words: str) -> Iterator[None]:
    """A mount, taken away again."""
    subprocess.run(["mount", *words], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", words[-1]], check=True)


def bound(source: str, place: str) -> contextlib.AbstractContextManager[None]:
    """A file or directory over another."""
    return mounted("--bind", f"/srv/{source}", f"/srv/{place}")


def empty(place: str) -> contextlib.AbstractContextManager[None]:
    """An empty file system over a directory."""
    return mounted("-t", "tmpfs", "-o", "mode=0755", "none", f"/srv/{place}")


class Asking:
    """Grants paths to one agent, and says what it answers, or how it is refused."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __call__(self, *read: str, write: str = "") -> Any:
        written = f"write = {json.dumps([write] if write else [])}"
        more = f"[permissions.filesystem]\nread = {json.dumps(read)}\n{written}\n"
        try:
            return self.world.ask(READS, filesystem="host" if write else "ephemeral", disk_mb=24, more=more)
        except errors.CovenantError as e:
            return refusal(e)
        except AssertionError as e:  # it was refused once it had an id
            return refusal(e.args[0][0])


def refusal(error: errors.CovenantError | None) -> list[str] | None:
    """Return the refusal as its client sees it."""
    return None if error is None else [error.code, error.message, error.hint]


def before(asking: Asking) -> dict[str, Any]:
    """Return the answers for paths covered before the run began."""
    found: dict[str, Any] = {"plain": asking("/srv/docs")}
    with bound("other/page", "docs/page"):
        found["a file over a file"] = asking("/srv/docs")
        found["that file alone"] = asking("/srv/docs/page")
        found["what lies beside it"] = asking("/srv/docs/inner")
    with empty("docs/inner"):
        found["a file system over a directory"] = asking("/srv/docs")
    with bound("other", "docs"):
        found["over the path itself"] = asking("/srv/docs")
        with bound("third/page", "docs/page"):
            found["in a mount over the path"] = asking("/srv/docs")
    with bound("docs", "seen"), bound("other/page", "seen/page"):
        found["elsewhere over the same file"] = asking("/srv/docs")
    found["taken away"] = asking("/srv/docs")
    return found


def writing(asking: Asking, base: Path) -> dict[str, Any]:
    """A path for writing has a file system of its own, which may lie in a path for reading."""
    room = image(base, "room", "nosuid,nodev", parent=DOCS)
    (room / "page").write_text("room")
    found = {"read alone": asking("/srv/docs"), "read and written": asking("/srv/docs", write=str(room))}
    (room / "below").mkdir(mode=0o755)
    with empty("docs/room/below"):
        found["covered for writing"] = asking(write=str(room))
        found["covered for writing, read around it"] = asking("/srv/docs", write=str(room))
    found["written"] = asking(write=str(room))
    subprocess.run(["umount", str(room)], check=True)
    room.rmdir()
    return found


def racing(asking: Asking) -> dict[str, Any]:
    """A mount comes between the look at a path and the copy of it, or between the copy and the next look."""
    found: dict[str, Any] = {}
    for name, module, call in (
        ("before the copy", mounts, "attached"),
        ("after the copy", covered, "check_all"),
    ):
        real, stack = getattr(module, call), contextlib.ExitStack()

        def comes(*rest: Any, real: Any = real, stack: contextlib.ExitStack = stack, **more: Any) -> Any:
            if not stack.__dict__.setdefault("came", False):
                stack.__dict__["came"] = True
                stack.enter_context(bound("other/page", "docs/page"))
            return real(*rest, **more)

        with stack:
            setattr(module, call, comes)
            try:
                found[name] = asking("/srv/docs")
            finally:
                setattr(module, call, real)
    found["nobody came"] = asking("/srv/docs")
    return found


def lasting(world: World) -> dict[str, Any]:
    """A mount comes while the run lasts: told with `alarm`, and with `end` the end of the run."""
    reads = '[permissions.filesystem]\nread = ["/srv/docs"]\n'
    world.configure(attest_seconds=1, on_drift="alarm")
    found: dict[str, Any] = {}
    with live(world, more=reads) as one:
        time.sleep(1.5)
        found["at first"] = [one.drift(), wrong(one)]
        for name, mount in (
            ("over a file", bound("other/page", "docs/page")),
            ("over the path", empty("docs")),
            ("above the path", mounted("-t", "tmpfs", "none", "/srv")),
        ):
            told = len(one.drift())
            with mount:
                found[name] = [wrong(one), one.drift_after(told)[0]]
            found[f"{name}, taken away"] = wrong(one)
        DOCS.rename(PLACE / "renamed")
        try:
            found["renamed"] = wrong(one)
            with bound("other/page", "renamed/page"):
                found["over a file, renamed"] = wrong(one)
        finally:
            (PLACE / "renamed").rename(DOCS)
        found["named as before"] = wrong(one)
    world.configure(attest_seconds=1)
    with live(world, more=reads) as one, bound("other/page", "docs/page"):
        found["ended"] = refusal(one.wait().error)
    return found


def wrong(one: Live) -> list[list[str]]:
    """The layers that do not hold."""
    return [[layer.name, layer.found] for layer in one.report().layers if not layer.holds]


def packaged(world: World) -> dict[str, Any]:
    """Run a package with mounts over its files: it is read through no mount, so a covered file is refused."""
    path = world.sign(world.copy("hello"))

    def run() -> list[str] | None:
        try:
            return refusal(world.run(path).error)
        except errors.CovenantError as e:
            return refusal(e)

    found = {"plain": run()}
    with mounted("--bind", str(path / "main.py"), str(path / "main.py")):
        found["a file in it covered"] = run()
    with mounted("--bind", str(path), str(path)):
        found["mounted itself"] = run()
    found["taken away"] = run()
    return found


def main(base: Path, warm: Path) -> dict[str, Any]:
    """Return the results of all parts."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "none", str(PLACE)], check=True)
    for name in ("docs", "other", "third", "seen"):
        lay(PLACE / name, name)
    world = World(base, warm=warm)
    asking = Asking(world)
    return {
        "before": before(asking),
        "writing": writing(asking, base),
        "racing": racing(asking),
        "packaged": packaged(world),
        "lasting": lasting(world),
        "leftovers": leftovers(world),
    }


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1]), Path(sys.argv[2])), sys.stdout)
