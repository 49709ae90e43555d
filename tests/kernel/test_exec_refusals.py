"""Bad words of `covenant exec`: each is refused before anything starts, and the command of its fix works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home
from tests.kernel.test_exec import PLACES, PROBE
from tests.kernel.world import ROOT

ZEROS = "0" * 64


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("refusals"), "debian-minimal")
    yield made
    assert leftovers(made.world) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of a layer with one program."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_text("#!/bin/sh\necho tool $1\n")
    (tmp_path / "bin/tool").chmod(0o755)
    return tmp_path


def apply(home: Home, fix: str, **values: str | Path) -> None:
    """Run the first `covenant` command of a fix, with its capital words replaced."""
    words = re.split(r"[;(]| or |, or ", fix.partition("covenant ")[2])[0].split()
    done = home.covenant(*(str(values.get(word, word)) for word in words))
    assert done.returncode == 0, (fix, words, done.stderr)


def works(home: Home, *words: str | Path) -> bytes:
    done = home.exec("--quiet", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_missing_base_names_its_build(tmp_path: Path) -> None:
    empty = Home(tmp_path)
    message, fix = empty.refused("--", "echo", "now")
    assert message == "the layer `debian-minimal` of the profile is not in the store"
    assert fix == "covenant layer build debian-minimal"
    apply(empty, fix)
    assert works(empty, "--", "echo", "now") == b"now\n"


def test_missing_layer_of_profile_names_its_build(home: Home) -> None:
    message, fix = home.refused("--", "python3", "-c", "print(1)")
    assert message == "the layer `python3` of the profile is not in the store"
    apply(home, fix)
    assert works(home, "--", "python3", "-c", "print(1)") == b"1\n"


def test_unknown_layer_names_its_sources(home: Home, tree: Path) -> None:
    command = ("--layer", "tools", "--", "/opt/tool")
    message, fix = home.refused(*command)
    assert message.startswith("--layer `tools`: no layer `tools` is in the store")
    assert fix.startswith("covenant layer build tools --from DIR (or: venv DIR")
    apply(home, fix, DIR=tree)
    message, _ = home.refused(*command)
    assert message == "program `/opt/tool` is not in debian-minimal, tools"
    assert works(home, "--layer", "tools", "--", "/bin/tool", "one") == b"tool one\n"


def test_misspelled_layer_names_nearest(home: Home, tree: Path) -> None:
    assert home.covenant("layer", "build", "spelled", "--from", tree, "--prefix", "/opt").returncode == 0
    _, fix = home.refused("--layer", "speled", "--", "true")
    (near,) = re.findall(r"^did you mean `(\w+)`\?", fix)
    assert works(home, "--layer", near, "--", "/opt/bin/tool", "x") == b"tool x\n"


def test_digest_that_does_not_match(home: Home, tree: Path) -> None:
    assert home.covenant("layer", "build", "pinned", "--from", tree, "--prefix", "/opt").returncode == 0
    message, fix = home.refused("--layer", f"pinned@sha256:{ZEROS}", "--", "true")
    assert f"pinned@sha256:{ZEROS}" in message
    (there,) = re.findall(r"the store has (pinned@sha256:[0-9a-f]{64}): give that", fix)
    assert works(home, "--layer", there, "--", "/opt/bin/tool", "x") == b"tool x\n"


def test_name_of_two_layers_names_digests(home: Home, tree: Path) -> None:
    build = ("layer", "build", "twice", "--from", tree, "--prefix")
    assert [home.covenant(*build, prefix).returncode for prefix in ("/opt/a", "/opt/b")] == [0, 0]
    message, fix = home.refused("--layer", "twice", "--", "true")
    assert "is the name of 2 layers" in message
    digests = re.findall(r"[0-9a-f]{12}", fix)
    found = [home.exec("--quiet", "--layer", one, "--", "sh", "-c", "ls -d /opt/*").stdout for one in digests]
    assert sorted(found) == [b"/opt/a\n", b"/opt/b\n"]


def test_hidden_character_names_its_argument(home: Home) -> None:
    message, fix = home.refused("--", "printf", "\x1b[31m")
    assert message == "argument 1 of the command holds the hidden character U+001B: `\\x1b[31m`"
    (escape,) = re.findall(r"printf '(\S+)' writes an escape", fix)
    assert works(home, "--", "printf", f"{escape}[31m") == b"\x1b[31m"


def test_intent_in_argument_can_be_written(home: Home) -> None:
    message, fix = home.refused("--", "echo", "{intent}")
    assert message.startswith("argument 1 of the command holds {intent}")
    (script,) = re.findall(r"sh -c '(.*)'", fix)
    assert works(home, "--", "sh", "-c", script) == b"{intent}\n"


def test_argument_that_is_no_text(home: Home) -> None:
    command: list[str | bytes] = [sys.executable, "-m", "covenant", "exec", "--", "printf", b"\xff"]
    done = subprocess.run(command, env=home.environment(), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (125, b"")
    assert b"argument 1 of the command is not UTF-8" in done.stderr
    assert works(home, "--", "printf", r"\377") == b"\xff"


def test_variable_with_name_of_secret(home: Home) -> None:
    message, fix = home.refused("--secret", "TOKEN", "--env", "TOKEN=x", "--", "env")
    assert message == "--env TOKEN has the name of the secret `TOKEN`"
    assert fix.startswith("leave --env TOKEN out")
    # Without it the session asks for the vault, as its fix says.
    message, fix = home.refused("--secret", "TOKEN", "--", "env")
    assert (message.split(" (")[0], fix) == (
        "there is no vault",
        "covenant vault init; if [vault] key is not configured: covenant vault init --key-file FILE",
    )


def test_variable_of_loader_is_refused(home: Home) -> None:
    message, fix = home.refused("--env", "LD_PRELOAD=/tmp/x.so", "--", "true")
    assert message == "--env `LD_PRELOAD=/tmp/x.so` sets LD_PRELOAD, which no session may set"
    assert fix == "leave it out"
    assert works(home, "--", "true") == b""


def test_terminal_without_terminal(home: Home) -> None:
    message, fix = home.refused("--tty", "--", "echo", "ran")
    assert message.startswith("--tty needs a terminal")
    assert fix == "run it in a terminal, or leave --tty out"
    assert works(home, "--", "echo", "ran") == b"ran\n"
    with home.terminal("--tty", "--", "echo", "ran") as one:
        assert one.ended() == 0
    message, fix = home.refused("--record", "cast", "--", "echo", "ran")
    assert message == "--record is for a session with a terminal"
    assert fix == "run it in a terminal, or leave --record out"


def test_profile_that_asks_for_more_than_role(home: Home) -> None:
    message, fix = home.refused("--role", "observer", "--", "echo", "ran")
    assert message.startswith("profile `shell` with these options asks for more than role `observer`: ")
    assert "execute every program of root" in message
    (role,) = re.findall(r"give --role (\S+), or leave --role out", fix)
    assert works(home, "--role", role, "--", "echo", "ran") == b"ran\n"
    message, fix = home.refused("--role", "coordinater", "--", "echo", "ran")
    assert (message, fix.partition("? ")[0]) == ("role `coordinater` is not known", "did you mean `coordinator`")


def test_unknown_profile_names_nearest(home: Home) -> None:
    message, fix = home.refused("--profile", "shel", "--", "echo", "ran")
    assert message == "profile `shel` is not known"
    (near,) = re.findall(r"did you mean `(\w+)`\?", fix)
    assert works(home, "--profile", near, "--", "echo", "ran") == b"ran\n"


def test_command_that_root_lacks(home: Home, tree: Path) -> None:
    (tree / "bin/tool").rename(tree / "bin/lonely")
    message, fix = home.refused("--", "lonely")
    assert message == "program `lonely` is not in debian-minimal"
    assert fix.startswith("build a layer that has it: covenant layer build lonely ")
    apply(home, fix.replace("host-packages PACKAGE", "--from DIR"), DIR=tree)
    _, fix = home.refused("--", "lonely")
    (layer,) = re.findall(r"^add --layer (\w+), which has it$", fix)
    assert works(home, "--layer", layer, "--", "lonely", "x") == b"tool x\n"


def test_command_of_own_directory_says_layer(home: Home, tree: Path) -> None:
    message, fix = home.refused("--", "./tool")
    assert message.startswith("`./tool` is a path of this directory")
    assert fix.startswith("with --workspace . start it by a program of the root: -- env ./tool; or")
    assert works(home, "--workspace", tree / "bin", "--", "env", "./tool", "x") == b"tool x\n"
    apply(home, fix, DIR=tree / "bin", NAME="mine", **{"/opt/NAME": "/opt/mine"})
    assert works(home, "--layer", "mine", "--", "/opt/mine/tool", "x") == b"tool x\n"


def test_path_that_is_missing(home: Home) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="covenant-exec-") as folder:
        place = Path(folder) / "docs"
        command = ("--read", place, "--", "ls", "-d", place)
        message, _ = home.refused(*command)
        assert message == f"--read `{place}`: there is nothing at `{place}`"
        place.mkdir(mode=0o755)
        assert works(home, *command).decode() == f"{place}\n"


def test_path_below_scratch_says_layer(home: Home, tree: Path) -> None:
    """The directory of a test is below /tmp, as much that users want to read."""
    assert str(tree).startswith("/tmp/")
    message, fix = home.refused("--read", tree, "--", "true")
    assert message == f"--read `{tree}`: every session has a /tmp of its own"
    apply(home, fix.replace(", then", "; then"), NAME="carried", **{"/opt/NAME": "/opt/carried"})
    assert works(home, "--layer", "carried", "--", "/opt/carried/bin/tool", "x") == b"tool x\n"


def test_port_that_is_none(home: Home) -> None:
    message, fix = home.refused("--net", "93.184.216.34:http", "--", "true")
    assert message == "--net `93.184.216.34:http` has no port from 1 to 65535"
    assert fix == "write --net HOST or --net HOST:PORT"
    message, fix = home.refused("--net", "localhost:80", "--", "true")
    assert message == 'host `localhost` has a single label (in the session\'s manifest: host = "localhost")'
    assert fix == "write the full name, or an address"
    # With its fix the same words are a manifest; whether this machine has an uplink is not theirs.
    with tempfile.TemporaryDirectory() as folder:
        words = ("--net", "127.0.0.1:80", "--save", f"{folder}/saved", "--", "bash", "-c", PROBE, "bash", *PLACES)
        assert home.exec(*words).returncode == 0


def test_option_that_is_unknown_is_no_command(home: Home) -> None:
    done = home.exec("--raed", "/srv", "--", "true")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"No such option '--raed'" in done.stderr
    assert b"'--read'" in done.stderr


def test_user_without_rights_is_told() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="covenant-exec-") as folder:
        os.chown(folder, 65534, 65534)
        environment = {"COVENANT_HOME": folder, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-m", "covenant"]
        done = subprocess.run([*command, "exec", "--", "true"], env=environment, capture_output=True, check=False)
    assert done.returncode == 125
    assert b"a session needs root" in done.stderr
    assert b"fix: run it with sudo, and give COVENANT_HOME" in done.stderr
