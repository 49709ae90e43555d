"""`covenant exec` with the built-in base: pipes, a terminal, each option, and what is refused beside its control."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import internet
from tests.kernel.conftest import leftovers
from tests.kernel.internet import Internet
from tests.kernel.session_kit import Home

GRANTED = b"exec: profile shell (version 2), debian-minimal\n  mode ephemeral\n  execute every program of root\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("exec"), "debian-minimal", "python3", "nodejs")
    yield made
    assert leftovers(made.world) == []


def test_exec_passes_pipes_and_status_on(home: Home) -> None:
    data = os.urandom(300_000)
    done = home.exec("--", "sh", "-c", "cat; echo aside >&2; exit 7", stdin=data)
    assert (done.returncode, done.stdout) == (7, data)
    assert done.stderr.startswith(GRANTED)
    assert b"\n  no network\n" in done.stderr
    assert b"not an operator's signature" in done.stderr
    assert done.stderr.endswith(b"\naside\n")


def test_exec_keeps_arguments_as_they_are(home: Home) -> None:
    words = ["", " a  b", "$(id)", "--quiet", 'é"\\n', "two\nlines"]
    done = home.exec("--quiet", "printf", "<%s>", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "".join(f"<{word}>" for word in words)


def test_exec_status_says_signal(home: Home) -> None:
    killed = home.exec("--quiet", "--", "sh", "-c", "kill -TERM $$")
    assert (killed.returncode, b"dev: signed" in killed.stderr) == (128 + 15, False)


def test_exec_gives_terminal(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "cast"
    with home.terminal(
        "--record", file, "--", "bash", "-c", "test -t 0 && test -t 2 && stty size; read -p 'NAME? ' a; echo $a; exit 9"
    ) as one:
        one.until(b"NAME? ")
        assert b"30 90" in one.shown
        one.type(b"ada\r")
        assert one.ended() == 9
        assert one.shown.endswith(b"ada\r\nada\r\n")
    events = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert "".join(text for _, kind, text in events if kind == "o").endswith("NAME? ada\r\nada\r\n")
    ended = [row["kind"] for row in home.world.rows() if row["kind"]["type"] == "session_ended"]
    assert ended[-1]["recording_hash_hex"] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_exec_interrupt_is_key_of_program(home: Home) -> None:
    with home.terminal("--", "bash", "-c", "trap 'echo caught; exit 5' INT; echo READY; sleep 60 & wait") as one:
        one.until(b"READY")
        one.type(b"\x03")
        assert one.ended() == 5
        assert b"caught" in one.shown


def test_exec_without_tty_in_terminal(home: Home) -> None:
    with home.terminal("--no-tty", "--", "sh", "-c", "test -t 1 || echo no terminal") as one:
        assert one.ended() == 0
        assert b"no terminal" in one.shown


def test_exec_sets_variables(home: Home) -> None:
    done = home.exec("--env", "GREETING=hello = world", "--env", "EMPTY=", "--", "env")
    lines = done.stdout.decode().splitlines()
    assert "GREETING=hello = world" in lines
    assert "EMPTY=" in lines
    assert "GREETING" not in home.exec("--quiet", "--", "env").stdout.decode()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that no mount of a sandbox covers."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="covenant-exec-") as folder:
        yield Path(folder)


def test_exec_reads_granted_path_alone(home: Home, place: Path) -> None:
    for name in ("granted", "other"):
        (place / name).mkdir(mode=0o755)
        (place / name / "note").write_text(name)
    place.chmod(0o755)
    script = f"cat {place}/granted/note; cat {place}/other/note || echo ' refused'; echo x > {place}/granted/note"
    done = home.exec("--quiet", "--read", place / "granted", "--", "sh", "-c", script)
    assert done.stdout.decode() == "granted refused\n"
    assert done.returncode == 2
    assert (place / "granted/note").read_text() == "granted"
    both = home.exec("--quiet", "--read", place / "granted", "--read", place / "other", "--", "sh", "-c", script)
    assert both.stdout.decode() == "grantedother"


def test_exec_writes_its_own_scratch_alone(home: Home) -> None:
    places = "/tmp /dev/shm /etc /usr/bin / /home /root /var/tmp"
    script = f"for d in {places}; do (echo x > $d/probe) 2>/dev/null && echo wrote $d; done; cd; pwd"
    done = home.exec("--quiet", "--", "sh", "-c", script)
    assert done.stdout.decode().split("\n") == ["wrote /tmp", "wrote /dev/shm", "/tmp", ""]


def test_exec_layer_adds_programs(home: Home, tmp_path: Path) -> None:
    tool = tmp_path / "tree/bin/greet"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho hello from $0\n")
    tool.chmod(0o755)
    built = home.covenant("layer", "build", "greet", "--from", tmp_path / "tree", "--prefix", "/opt/greet")
    assert built.returncode == 0, built.stderr
    done = home.exec("--layer", "greet", "--", "/opt/greet/bin/greet")
    assert done.stdout == b"hello from /opt/greet/bin/greet\n"
    assert b"debian-minimal, greet\n" in done.stderr


def test_exec_starts_program_of_environment(home: Home, place: Path) -> None:
    """A virtual environment as a layer brings its programs on PATH, at its own place."""
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", place / "venv"], check=True)
    program = place / "venv/bin/own"
    program.write_text(f"#!{place}/venv/bin/python\nimport sys\nprint(sys.prefix)\n")
    program.chmod(0o755)
    assert home.covenant("layer", "build", "own", "venv", place / "venv").returncode == 0
    done = home.exec("--profile", "python", "--layer", "own", "--", "own")
    assert (done.returncode, done.stdout.decode()) == (0, f"{place}/venv\n"), done.stderr


def test_exec_saves_what_an_operator_signs(home: Home, tmp_path: Path) -> None:
    package = tmp_path / "saved"
    before = home.starts()
    saved = home.exec("--env", "WHO=operator", "--save", package, "--", "sh", "-c", "cat; echo $WHO; exit 4")
    assert (saved.returncode, home.starts()) == (0, before)
    home.world.sign(package)
    done = home.covenant("run", package, stdin=b"asked ")
    assert (done.returncode, done.stdout) == (4, b"asked operator\n"), done.stderr
    assert b"not an operator's signature" not in done.stderr
    sign, run = re.findall(r"covenant (\w+(?: \w+)?) \S+", saved.stdout.decode().partition("saved: ")[2])
    assert (sign, run) == ("manifest sign", "run")


def test_exec_sessions_of_one_program_coexist(home: Home, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "covenant", "exec", "--quiet", "--", "sh", "-c"]
    with subprocess.Popen(
        [*command, "echo ready; cat"],
        env=home.environment(),
        cwd=home.base,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"ready\n"
        second = home.exec("--quiet", "--", "sh", "-c", "echo another")
        assert (second.returncode, second.stdout) == (0, b"another\n"), second.stderr
        out, _ = first.communicate(b"still there\n", timeout=60)
    assert (first.returncode, out) == (0, b"still there\n")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("python3", "-c", "import ssl, sqlite3, ctypes; print('python')"), b"python\n"),
        (("node", "-e", "console.log(require('v8').getHeapStatistics().heap_size_limit >> 20 < 1700)"), b"true\n"),
    ],
)
def test_exec_profile_of_interpreter_works(home: Home, command: tuple[str, ...], shown: bytes) -> None:
    done = home.exec("--", *command)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
    assert f"exec: profile {command[0].rstrip('3')} ".encode() in done.stderr


def test_exec_runs_on_one_processor(home: Home) -> None:
    own = [sys.executable, "-m", "covenant", "exec", "--quiet", "--", "echo", "ran"]
    done = subprocess.run(
        ["taskset", "-c", "0", *own], env=home.environment(), cwd=home.base, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr


# --- a volume -----------------------------------------------------------------------------------------


@pytest.fixture
def mounting(home: Home) -> Iterator[list[str]]:
    """Return the prefix of commands in a mount namespace of the test, which the home's commands have too."""
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo ready; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        home.before = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"]
        yield home.before
        home.before = []
        holder.kill()


def test_exec_writes_to_volume(home: Home, mounting: list[str], place: Path) -> None:
    room = place / "room"
    room.mkdir(mode=0o755)
    script = f"echo kept > {room}/new && cat {room}/new; echo x > {place}/out || echo refused; pwd"
    command = ("--write", room, "--", "sh", "-c", script)
    message, fix = home.refused(*command)
    assert message.startswith(f"--write `{room}` has no bound: it is part of the file system that is mounted at `/")
    for step in fix.partition(": ")[2].replace("IMAGE", f"{place}/image").split("; "):
        subprocess.run([*mounting, *step.split()], check=True, capture_output=True)
    done = home.exec(*command)
    assert (done.returncode, done.stdout) == (0, b"kept\nrefused\n/tmp\n"), done.stderr
    assert f"  write {room}\n".encode() in done.stderr
    again = home.exec("--quiet", "--write", room, "--", "cat", room / "new")
    assert again.stdout == b"kept\n"
    without = home.exec("--quiet", "--", "cat", room / "new")
    assert without.returncode == 1


# --- secrets ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(home: Home) -> Home:
    with (home.world.state / "config.toml").open("a") as file:
        file.write(f'[vault]\nkey = "{home.base}/vault.key"\n')
    assert home.covenant("vault", "init").returncode == 0
    return home


def test_exec_secret_is_file_and_variable(keyed: Home) -> None:
    script = 'cat $CREDENTIALS_DIRECTORY/mail; echo "<$TOKEN>"; ls $CREDENTIALS_DIRECTORY'
    message, fix = keyed.refused("--secret", "mail=TOKEN", "--", "sh", "-c", script)
    assert "--secret mail" in message
    words = fix.replace(" < FILE", "").split()[1:]
    value = 'it\'s a "$(secret)"\n\n'
    assert keyed.covenant(*words, stdin=f"{value}\n".encode()).returncode == 0
    done = keyed.exec("--secret", "mail=TOKEN", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout.decode()) == (0, f"{value}<{value}>\nmail\n"), done.stderr
    assert b"  credential mail\n  TOKEN = secret mail: every process of the session can read it\n" in done.stderr
    assert value.encode() not in done.stderr
    without = keyed.exec("--quiet", "--secret", "mail", "--", "sh", "-c", 'echo "<$TOKEN>"')
    assert without.stdout == b"<>\n"
    granted = [row["kind"] for row in keyed.world.rows() if row["kind"]["type"] == "credential_granted"]
    assert [(row["agent_id"], row["name"]) for row in granted] == [("exec-sh", "mail")] * 2


def test_exec_secret_belongs_to_one_program(keyed: Home) -> None:
    message, fix = keyed.refused("--secret", "mail", "--", "cat")
    assert "`exec-cat`" in message
    assert fix == "covenant vault put exec-cat mail < FILE"


def test_dev_has_no_secret_of_any_id(keyed: Home, tmp_path: Path) -> None:
    """A package that was saved is one like any other, with the id of a session too."""
    keyed.covenant("vault", "put", "librarian", "mail", stdin=b"x")
    package = tmp_path / "saved"
    assert keyed.exec("--save", package, "--secret", "mail", "--", "sh", "-c", "true").returncode == 0
    manifest = package / "agent.toml"
    for agent_id in ("exec-sh", "librarian"):
        manifest.write_text(manifest.read_text().replace('id = "exec-sh"', f'id = "{agent_id}"'))
        done = keyed.covenant("dev", package)
        assert (done.returncode, b"is given no secret" in done.stderr) == (125, True), done.stderr


# --- a network ----------------------------------------------------------------------------------------

PROBE = 'for to in "$@"; do (read -t 20 line <>/dev/tcp/$to && echo $to open || echo $to closed) 2>/dev/null; done'
PLACES = ("93.184.216.34/80", "9.9.9.9/80", "api.example.com/80")


def _within(net: Internet, home: Home, *words: str) -> list[str]:
    none = ("--quiet", "--no-workspace")
    command = [sys.executable, "-m", "covenant", "exec", *none, *words, "--", "bash", "-c", PROBE, "bash", *PLACES]
    return net.run("host", *command, env=home.environment()).split("\n")[:-1]


def test_exec_reaches_granted_hosts_alone(tmp_path: Path, net: Internet) -> None:
    home = Home(tmp_path, "debian-minimal")
    home.world.configure(uplink="eth0", resolvers=[internet.RESOLVER])
    closed = [f"{place} closed" for place in PLACES]
    assert _within(net, home) == closed
    assert _within(net, home, "--net", "93.184.216.34:80") == [f"{PLACES[0]} open", *closed[1:]]
    assert _within(net, home, "--net", "api.example.com:80", "--net", "9.9.9.9:80")[1:] == [
        f"{place} open" for place in PLACES[1:]
    ]
    assert net.leftovers() == leftovers(home.world) == []


TLS = """
import socket, ssl, sys
for name in ("www.example.com", "other.example.com"):
    try:
        with socket.create_connection((name, 443), 20) as plain:
            with ssl.create_default_context(cafile=sys.argv[1]).wrap_socket(plain, server_hostname=name) as secure:
                secure.sendall(b"name\\n")
                print(secure.recv(200).decode().strip())
    except OSError as e:
        print(type(e).__name__)
"""


def test_exec_host_without_port_is_tls_name(tmp_path: Path, net: Internet, place: Path) -> None:
    home = Home(tmp_path, "debian-minimal", "python3")
    home.world.configure(uplink="eth0", resolvers=[internet.RESOLVER])
    place.chmod(0o755)
    (place / "ca.pem").write_text(net.certificate)
    words = [
        "--quiet",
        "--no-workspace",
        "--net",
        "www.example.com",
        "--read",
        f"{place}/ca.pem",
        "--",
        "python3",
        "-c",
        TLS,
    ]
    command = [sys.executable, "-m", "covenant", "exec", *words, f"{place}/ca.pem"]
    assert net.run("host", *command, env=home.environment()).split() == ["www.example.com", "gaierror"]
    assert net.leftovers() == leftovers(home.world) == []
