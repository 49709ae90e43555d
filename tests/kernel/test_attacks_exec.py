"""Attacks on `covenant exec` and on roots that are EROFS files: the image, the terminal, secrets, killed commands.

Root of the host attacks the images, in a state of the test's own. Each attack is beside its control.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy import errors
from policy.prove.live import Standing
from sandbox.attest import root_file
from sandbox.layers.images import RootImages
from sandbox.rootfs import erofs_image
from tests.kernel.conftest import leftovers, unfinished
from tests.kernel.live_runs import SLEEPS, live, until
from tests.kernel.session_kit import Home
from tests.kernel.test_command import shell_layer, with_root
from tests.kernel.test_contract_terminal import TERMINAL, Screen, screen
from tests.kernel.test_erofs_roots import images, sleeping, standing, text
from tests.kernel.world import World

__all__ = ["screen"]

# --- the image of a root ------------------------------------------------------------------------------


@contextlib.contextmanager
def mapped(file: Path) -> Iterator[Callable[[bytes], None]]:
    """Map a file for writing, with a page that is dirty already. Yields a function that writes over a word of it.

    The kernel notes the time of the first write to a clean page alone.
    """
    at = file.read_bytes().index(b"of the layer")
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        memory[at : at + 1] = memory[at : at + 1]

        def write(word: bytes) -> None:
            before = file.stat()
            memory[at : at + len(word)] = word
            assert erofs_image.identity(file.stat()) == erofs_image.identity(before), "the write leaves no trace"

        yield write


def test_mapped_image_is_refused(world: World, tmp_path: Path) -> None:
    """The bytes are right when the start looks, and another process can change them unseen."""
    package = with_root(world, shell_layer(world, tmp_path), "cat /srv/note")
    assert text(world, package) == "of the layer"
    (file,) = images(world)
    with mapped(file), pytest.raises(errors.LayerChangedError, match="open for writing"):
        world.run(package)
    assert text(world, package) == "of the layer", "control"


def test_mapped_image_of_live_run_is_drift(world: World, tmp_path: Path) -> None:
    # The run's own first examination may come after the change; it would end the run.
    world.configure(attest_seconds=3600, on_drift="alarm")
    with live(world, SLEEPS, more=sleeping(world, tmp_path)) as one:
        (file,) = images(world)
        assert set(standing(one).values()) == {Standing.EQUAL}, "control"
        with mapped(file) as write:
            found = {name: how for name, how in standing(one).items() if how != Standing.EQUAL}
            assert found == {root_file.NAME: Standing.WIDER}
            write(b"OF THE")
            assert not one.report().holds


def _hard_link(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes().replace(b"of the layer", b"of somebody!"))
    other.chmod(0o400)
    os.link(other, file.with_name("second"))
    file.unlink()
    os.link(other, file)


def _link(file: Path) -> None:
    file.rename(file.with_name("held"))
    file.symlink_to("held")


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o400)


def _record(name: str, act: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return what does an act with a file beside the image."""
    return lambda file: act(file.with_name(name))


REPLACED: dict[str, Callable[[Path], object]] = {
    "hard link": _hard_link,
    "link": _link,
    "fifo": _fifo,
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 4096),
    "meta: none": _record("meta.json", Path.unlink),
    "meta: no JSON": _record("meta.json", lambda meta: meta.write_bytes(b"\xff{")),
    "meta: other kind": _record("meta.json", lambda m: m.write_text(m.read_text().replace('"erofs"', '"tree"'))),
    "meta: link": _record("meta.json", _link),
    "table: none": _record("table", Path.unlink),
    "table: fifo": _record("table", _fifo),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_image_is_refused(world: World, tmp_path: Path, name: str) -> None:
    package = with_root(world, shell_layer(world, tmp_path), "cat /srv/note")
    assert text(world, package) == "of the layer", "control"
    (file,) = images(world)
    REPLACED[name](file)
    with pytest.raises(errors.LayerChangedError) as e:
        world.run(package)
    assert "gc --images" in e.value.hint
    RootImages(world.state).collect(unused_seconds=-1)
    assert text(world, package) == "of the layer"


# A program that sleeps reads nothing, and a shorter image is then felt late or never.
READS = """import os, time
while True:
    for name in (os.__file__, "/srv/note"):
        open(name, "rb").read()
    time.sleep(0.1)
"""


@pytest.mark.parametrize("name", ["truncated", "unlinked", "record"])
def test_image_is_attacked_during_run(world: World, tmp_path: Path, name: str) -> None:
    """A file without its name is the same file. A shorter one ends a run that reads it (SIGBUS)."""
    world.configure(attest_seconds=3600)
    with live(world, READS, more=sleeping(world, tmp_path)) as one:
        (file,) = images(world)
        assert set(standing(one).values()) == {Standing.EQUAL}, "control"
        if name == "truncated":
            os.truncate(file, 4096)
            assert one.wait().error is not None
        elif name == "unlinked":
            file.unlink()
            assert set(standing(one).values()) == {Standing.EQUAL}
        else:
            (file.parent / "meta.json").write_text("{}")
            (file.parent / erofs_image.TABLE).write_text("")
            assert set(standing(one).values()) == {Standing.EQUAL}
        package = one.world.base / "packages" / "probe"
        if name == "record":
            with pytest.raises(errors.LayerChangedError, match="damaged"):
                world.run(package)
        else:
            with pytest.raises(errors.LayerChangedError):
                world.run(package)


# --- `covenant exec` ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("attacked"), "debian-minimal")
    with (made.world.state / "config.toml").open("a") as file:
        file.write(f'[vault]\nkey = "{made.base}/vault.key"\n')
    assert made.covenant("vault", "init").returncode == 0
    yield made
    assert leftovers(made.world) == []


def _started(home: Home, *words: str, scratch: Path | None = None) -> subprocess.Popen[bytes]:
    """Start ``covenant exec`` with pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "covenant", "exec", "--quiet", *words],
        env={**home.environment(), **({"TMPDIR": str(scratch)} if scratch else {})},
        cwd=home.base,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_killed_exec_leaves_no_file(home: Home, tmp_path: Path) -> None:
    process = _started(home, "--", "sh", "-c", "echo READY; cat", scratch=tmp_path)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"READY\n"
        process.kill()
    assert home.exec("--quiet", "--", "true").returncode == 0, "the next start removes the run's directory"
    until(lambda: unfinished(home.world) == [])
    assert list(tmp_path.iterdir()) == []


def _packers(home: Home) -> set[int]:
    """Return the processes of mkfs.erofs that work in the home."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"/mkfs.erofs") and os.fsencode(home.world.state) in words[-2]:
                found.add(int(entry))
    return found


def _unfinished(home: Home) -> list[str]:
    place = home.world.state / "rootfs" / "images"
    return [one.name for one in place.iterdir() if one.name.startswith(".")] if place.exists() else []


def test_killed_maker_of_image_leaves_nothing(home: Home) -> None:
    """Two commands make one image. The packer of the first is stopped, and the first is killed."""
    # The first run of a runsc packs a small image of its own, to see whether that works.
    assert home.exec("--quiet", "--", "true").returncode == 0
    RootImages(home.world.state).collect(unused_seconds=-1)
    with _started(home, "--", "sh", "-c", "echo first") as first:
        (packer,) = until(lambda: _packers(home))
        handle = os.pidfd_open(packer)
        try:
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
            assert len(_unfinished(home)) == 1
            assert home.exec("--quiet", "--", "sh", "-c", "echo second").stdout == b"second\n"
            assert _packers(home) == {packer}, "control: it waits while its parent lives"
            first.kill()
            first.wait()
            until(lambda: packer not in _packers(home))
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
    assert home.exec("--quiet", "--", "sh", "-c", "echo third").stdout == b"third\n"
    assert _unfinished(home) == []


# --- secrets ------------------------------------------------------------------------------------------


def _put(home: Home, name: str, value: bytes) -> bytes:
    """Put a secret for sessions of sh. Returns what the command said. One newline at the end is the input's own."""
    done = home.covenant("vault", "put", "exec-sh", name, stdin=value + b"\n")
    return b"" if done.returncode == 0 else done.stdout + done.stderr


def test_secret_of_any_bytes_is_exact(home: Home) -> None:
    """Quotes, newlines, what a shell expands, and every byte of UTF-8, in the largest secret."""
    every = "".join(map(chr, (*range(1, 0x800), 0x20AC, 0x1F600))).encode()
    value = (b"$(id)`id`${HOME}*~ \"'\\" + every * 5)[:16_380].decode(errors="ignore").encode() + b"\n\n."
    assert _put(home, "any", value) == b""
    done = home.exec("--quiet", "--secret", "any=TOKEN", "--", "sh", "-c", 'printf %s "$TOKEN"')
    assert (done.returncode, done.stdout) == (0, value), done.stderr


@pytest.mark.parametrize(
    "value", [b"", b"CANARY-" * 9363, b"CANARY\0", b"CANARY\xff"], ids=["empty", "64 KiB", "NUL", "no UTF-8"]
)
def test_secret_that_is_no_text_is_refused(home: Home, value: bytes) -> None:
    said = _put(home, "size", value)
    assert b"between 1 and 16384 bytes" in said or b"without NUL" in said, said
    assert b"CANARY" not in said
    assert "--secret size" in home.refused("--secret", "size=TOKEN", "--", "sh", "-c", "true")[0]


@pytest.mark.parametrize("variable", ["OPTIND", "IFS", "_", "BASH_ENV", "LC_ALL", "UID", "$(id)", "a b", "A=B", "A\n"])
def test_secret_is_no_variable_of_a_shell(home: Home, variable: str) -> None:
    """An assignment to OPTIND writes the value to stderr in dash, and evaluates it in bash."""
    message, _ = home.refused("--secret", f"mail={variable}", "--", "sh", "-c", "true")
    assert "sets" in message or "no name of a variable" in message


def _holders(value: bytes, *places: Path) -> set[str]:
    """Return the files below places that have a value, and the processes that have it as a word or a variable."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if value in Path(f"/proc/{entry}/{name}").read_bytes():
                    found.add(f"{name} of {entry}")
    for place in places:
        for folder, _, names in os.walk(place):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    if path.is_file() and not path.is_symlink() and value in path.read_bytes():
                        found.add(str(path))
    return found


def _family(home: Home, pid: int) -> set[int]:
    """Return a process, all that it started, and those that name its state."""
    found, new = {pid}, [pid]
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes()
            if b"runsc" in words and os.fsencode(home.world.state) in words:
                new.append(int(entry))
    while new:
        one = new.pop()
        found.add(one)
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            new += map(int, task.read_text().split())
    return found


def test_secret_is_nowhere_on_the_host(home: Home, tmp_path: Path) -> None:
    """It is in no word, variable or file, and no process of the session dumps its memory."""
    value = b"CANARY-" + os.urandom(16).hex().encode()
    assert _put(home, "hidden", value) == b""
    places = (home.base, tmp_path, Path("/dev/shm"))
    script = 'cp $CREDENTIALS_DIRECTORY/hidden /tmp/copy; printf %s "$TOKEN" > /dev/shm/copy; echo READY; cat'
    with _started(home, "--secret", "hidden=TOKEN", "--", "sh", "-c", script, scratch=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"READY\n"
        assert _holders(value, *places) == set()
        family = _family(home, process.pid)
        assert len(family) > 3
        for pid in family:
            limits = Path(f"/proc/{pid}/limits").read_text()
            # 1 byte stops the handler of core_pattern too (policy.core_dumps).
            assert re.search(r"^Max core file size +[01] ", limits, re.MULTILINE), (pid, limits)
        process.stdin.close()
        assert process.wait(60) == 0
        assert value not in process.stdout.read() + process.stderr.read()
    assert _holders(value, *places) == set()
    # Control: the search finds a variable, a word and a file.
    (tmp_path / "file").write_bytes(value)
    with subprocess.Popen(["/bin/sleep", "60"], env={"TOKEN": value.decode()}) as held:
        found = _holders(value, tmp_path)
        held.kill()
    assert found == {f"environ of {held.pid}", str(tmp_path / "file")}


# --- the terminal -------------------------------------------------------------------------------------

# Each line is a try, and whether it passed. The last of a group is its control.
TAKES = """
import ctypes, fcntl, os, signal, struct, sys, termios, time
libc = ctypes.CDLL(None, use_errno=True)
found = {}
def tries(name, act):
    try: found[name] = act() != -1
    except OSError: found[name] = False
def reads(path): os.close(os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
tries("steal: TIOCSCTTY", lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 1))
tries("steal: TIOCNXCL", lambda: fcntl.ioctl(0, termios.TIOCNXCL, 0))
tries("steal: TIOCEXCL", lambda: fcntl.ioctl(0, termios.TIOCEXCL, 0))
tries("steal: TIOCSTI", lambda: fcntl.ioctl(0, termios.TIOCSTI, b"x"))
tries("steal: TIOCLINUX", lambda: fcntl.ioctl(0, 0x541C, b"\\3"))
tries("steal: TIOCGDEV", lambda: fcntl.ioctl(0, 0x80045432, bytes(4)))
for name in ("console", "tty0", "tty1", "vcs", "vcsa", "ttyS0", "kmsg", *(f"pts/{n}" for n in range(64))):
    tries(f"open: /dev/{name}", lambda: reads(f"/dev/{name}"))
tries("open: /proc/1/fd/0", lambda: reads("/proc/1/fd/0"))
tries("open: ptmx", lambda: reads("/dev/ptmx"))
tries("control: size", lambda: fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)) and None)
for number in {*range(1, 32)} - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("CHILD", flush=True)
        while True:
            time.sleep(0.05)
            try: os.write(1, b"LATER")
            except OSError: pass
    os._exit(0)
time.sleep(1)
print("FOUND", *sorted(name for name, passed in found.items() if passed), sep="|", flush=True)
"""


def test_session_takes_no_terminal(world: World, screen: Screen) -> None:
    """The agent reaches its own terminal alone, and new ones of its sandbox. A daemon ends with the session."""
    screen.acts()
    done = world.run(world.sign(world.package({"main.py": TAKES}, more=TERMINAL)), "", caller=screen.streams)
    screen.joined()
    assert done.error is None, (done.error, done.stderr, screen.shown)
    lines = screen.shown.decode().replace("LATER", "").splitlines()
    assert "CHILD" in lines
    (said,) = [line for line in lines if line.startswith("FOUND")]
    assert said.split("|")[1:] == ["control: size", "open: /proc/1/fd/0", "open: ptmx"]
    assert leftovers(world) == []


def test_no_process_of_session_has_caller_terminal(home: Home) -> None:
    """The terminal of the caller controls the command alone, and no process of the sandbox has it open."""
    with home.terminal("--", "sh", "-c", "echo READY; read line; echo got $line") as one:
        one.until(b"READY")
        place = os.ttyname(one.slave)
        number = os.stat(place).st_rdev
        held = {}
        for pid in _family(home, one.process.pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            names = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            held[pid] = (int(fields[4]) == number, place in names)
        assert len(held) > 3
        assert held.pop(one.process.pid) == (True, True), "control"
        assert set(held.values()) == {(False, False)}, held
        one.type(b"x\r")
        assert one.ended() == 0
