"""`covenant learn`: what a program opens, starts and reaches becomes a manifest under which it runs again, and what it
tries beyond its ceiling does not."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.layers.store import LayerStore
from tests.kernel import internet
from tests.kernel.conftest import leftovers
from tests.kernel.internet import Internet
from tests.kernel.session_kit import Done, Home

SCRIPT = """
import os, subprocess
print(open("data.txt").read().strip(), os.path.isdir("unused"))
print(subprocess.run(["sh", "-c", "ls -d /usr | cat"], capture_output=True, text=True).stdout.strip())
open("/tmp/scratch", "w").write("x")
"""
TRIES = """
import glob, os, socket, subprocess
for path in ("/etc/shadow", "/root/.ssh/id_ed25519", "/var/lib/covenant", "/etc/passwd", "/proc/1/environ", "/etc/ssh",
             "../beside.txt", ".env", ".ssh/id_rsa", "keys/server.key", "/root/.aws/credentials", "/boot", "/"):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
        print("opened", path)
    except OSError as e:
        print(type(e).__name__, path)
for name in ("/etc/shadow", "covenant", "nft", "/usr/sbin/nft"):
    try:
        subprocess.run([name])
    except OSError:
        pass
try:
    socket.create_connection(("outside.example.org", 443), 3)
except OSError as e:
    print("no host", type(e).__name__)
print(open("used.txt").read())
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("learn"), "debian-minimal", "python3")
    yield made
    assert leftovers(made.world) == []


@pytest.fixture
def place() -> Iterator[Path]:
    # Every sandbox has a /tmp of its own, so that nothing of it can be granted at its place.
    made = Path(tempfile.mkdtemp(prefix="covenant-learn-", dir="/var/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def learn(home: Home, place: Path, *words: str | Path) -> tuple[Done, dict[str, Any], dict[str, Any]]:
    """Learn in a directory. Returns the command's end, the manifest and its evidence."""
    target = home.base / f"learnt-{len(os.listdir(home.base))}"
    done = home.covenant("learn", "--workspace", place, "--to", target, *words)
    manifest = tomllib.loads((target / "agent.toml").read_text()) if target.exists() else {}
    evidence = json.loads((target / "evidence.json").read_text()) if target.exists() else {}
    return done, manifest | {"path": target}, evidence


def test_learnt_package_runs_again(home: Home, place: Path) -> None:
    (place / "script.py").write_text(SCRIPT)
    (place / "data.txt").write_text("data\n")
    for number in range(20):
        (place / f"other{number}").write_text("never read\n")
    (place / "unused").mkdir()
    home.world.configure(self_test=True)
    done, manifest, evidence = learn(home, place, "--", "/usr/bin/python3", "script.py")
    assert (done.returncode, done.stdout) == (0, b"data True\n/usr\n"), done.stderr
    # The probes of the self-test are not the command's.
    assert evidence["left_out"] == []
    permissions = manifest["permissions"]
    assert set(permissions["filesystem"]["read"]) == {f"{place}/script.py", f"{place}/data.txt"}
    assert permissions["executables"]["allow"] == ["/usr/bin/cat", "/usr/bin/sh", "/usr/bin/ls"]
    assert "workspace" not in manifest
    assert manifest["resources"]["network"] == "off"
    values = {line["value"] for line in evidence["lines"]}
    assert values == {*permissions["filesystem"]["read"], *permissions["executables"]["allow"]}
    assert all(line["count"] and line["first_ns"] and line["by"] for line in evidence["lines"])
    text = (manifest["path"] / "agent.toml").read_text()
    assert re.search(rf'"{place}/data.txt",  # once, first 20[^\n]*, by python3\n', text)
    assert not (manifest["path"] / "agent.dsse.json").exists()
    again = home.covenant("dev", manifest["path"])
    assert (again.returncode, again.stdout) == (0, b"data False\n/usr\n"), again.stderr


def test_hostile_program_teaches_nothing_beyond(home: Home, place: Path) -> None:
    for name in (".ssh", "keys"):
        (place / name).mkdir()
    for name in (".env", ".ssh/id_rsa", "keys/server.key", "used.txt", "tries.py"):
        (place / name).write_text(TRIES if name == "tries.py" else "secret\n")
    for number in range(12):
        (place / f"keys/public{number}").write_text("public\n")
    done, manifest, evidence = learn(home, place, "--", "python3", "tries.py")
    said = done.stdout.decode().splitlines()
    assert done.returncode == 0, done.stderr
    # Controls: the program is no stranger to the files of the ceiling, and was given none of the others.
    assert {line.split()[1] for line in said if line.startswith("opened")} == {
        *(".env", ".ssh/id_rsa", "keys/server.key", "/proc/1/environ", "/etc/passwd", "/"),
    }
    reads = manifest["permissions"]["filesystem"]["read"]
    assert sorted(reads) == [f"{place}/tries.py", f"{place}/used.txt"]
    assert "allow" not in manifest["permissions"].get("executables", {})
    assert "network" not in manifest["permissions"]
    assert manifest["resources"]["network"] == "off"
    left = {one["what"]: one["why"] for one in evidence["left_out"]}
    assert left["/etc/shadow"].startswith("never granted: ")
    assert {f"{place}/{name}" for name in (".env", ".ssh/id_rsa", "keys/server.key")} <= set(left)


def test_made_directory_needs_workspace(home: Home, place: Path) -> None:
    done, manifest, _ = learn(home, place, "--quiet", "--", "mkdir", "made")
    assert (done.returncode, manifest["workspace"]["from"]) == (0, [str(place)]), done.stderr


AGENT = """
import json, os, subprocess, sys
intent = json.loads(sys.stdin.readline())
words = subprocess.run(["/usr/bin/sort", "-r"], input=intent["text"], capture_output=True, text=True, check=True).stdout
words += open("{used}/one.txt").read()
def told(path):
    try:
        return open(path).read()
    except OSError as e:
        return type(e).__name__
words += told("{place}/unused/two.txt") if "more" in intent["text"] else ""
print(json.dumps({{"text": words, "sources": []}}))
"""


def test_run_of_package_narrows_its_manifest(home: Home, place: Path) -> None:
    """The narrowed package does the same again, and no more: what the first could read, it cannot."""
    for name, text in (("used/one.txt", "one"), ("unused/two.txt", "two")):
        (place / name).parent.mkdir()
        (place / name).write_text(text)
    more = (
        f'[permissions.filesystem]\n# the author\'s words\nread = ["{place}/used", "{place}/unused"]\n'
        '[permissions.executables]\nallow = ["/usr/bin/sort", "/usr/bin/wc"]\n'
    )
    code = AGENT.format(used=place / "used", place=place)
    package = home.world.sign(home.world.package({"main.py": code}, name="wide", id="wide", more=more))
    target = home.base / "narrow"
    done = home.covenant("run", package, "a\nb\n", "--learn", target)
    assert (done.returncode, done.stdout) == (0, b"b\na\none\n"), done.stderr
    text = (target / "agent.toml").read_text()
    manifest = tomllib.loads(text)
    assert manifest["permissions"]["filesystem"]["read"] == [f"{place}/used/one.txt"]
    assert manifest["permissions"]["executables"]["allow"] == ["/usr/bin/sort"]
    assert "# the author's words" in text
    assert re.search(rf'"{place}/used/one.txt",? # once, first 20[^\n]*, by python3', text), text
    said = done.stderr.decode()
    assert f"taken out: permissions.filesystem.read: {place}/unused\n" in said
    assert "taken out: permissions.executables.allow: /usr/bin/wc\n" in said
    assert not (target / "agent.dsse.json").exists()
    narrowed = home.world.sign(target)
    # Control: the first package reads both.
    for one, words in ((package, b"more\nonetwo\n"), (narrowed, b"more\noneFileNotFoundError\n")):
        again = home.covenant("run", one, "more\n")
        assert (again.returncode, again.stdout) == (0, words), again.stderr
    again = home.covenant("run", narrowed, "a\n", "--learn", target)
    assert again.returncode != 0
    assert f"`{target}` is not empty".encode() in again.stderr


LINKS = """
import json, os, subprocess, sys
sys.stdin.readline()
os.symlink("/opt/tools/say", "/tmp/link")
said = subprocess.run(["/tmp/link", "--version"], capture_output=True, text=True).stdout.split()[:2]
print(json.dumps({"text": " ".join(said), "sources": []}))
"""


def test_link_of_scratch_does_not_widen_programs(home: Home, tmp_path: Path) -> None:
    """A program of a granted layer that is called by a link of /tmp would need the whole root, were it a file there."""
    (tmp_path / "opt/tools").mkdir(parents=True)
    for name in ("say", "other"):
        shutil.copy("/usr/bin/env", tmp_path / "opt/tools" / name)
    ref = LayerStore(home.world.state).pack_tree(tmp_path, "tools").ref
    grants = {}
    for name, allow in (("listed", "layer:tools"), ("control", "root")):
        more = f'[root]\nlayers = ["{ref}"]\n[permissions.executables]\nallow = ["{allow}"]\n'
        package = home.world.sign(home.world.package({"main.py": LINKS}, name=name, id=name, more=more))
        done = home.covenant("run", package, "hi", "--learn", home.base / f"linked-{name}")
        assert (done.returncode, done.stdout) == (0, b"env (GNU\n"), done.stderr
        manifest = tomllib.loads((home.base / f"linked-{name}" / "agent.toml").read_text())
        grants[name] = manifest["permissions"]["executables"]["allow"]
    assert grants == {"listed": ["/opt/tools/say"], "control": ["root"]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"backend": "trusted-local", "required": "false"}, b"--learn observes a sandbox"),
        (
            {"more": "[spawn]\nallowed = true\nmax_depth = 1\nmax_descendants = 1\n"},
            b"--learn does not observe children",
        ),
    ],
    ids=["without-sandbox", "with-children"],
)
def test_what_cannot_be_observed_is_not_learnt(home: Home, fields: dict[str, str], said: bytes) -> None:
    package = home.world.sign(home.world.package({"main.py": "raise SystemExit(3)\n"}, name="odd", id="odd", **fields))
    before = home.starts()
    done = home.covenant("run", package, "hi", "--learn", home.base / "odd-narrow")
    assert done.returncode != 0
    assert said in done.stderr
    assert home.starts() == before
    assert not (home.base / "odd-narrow").exists()


HOSTS = """
import socket, ssl, sys
for name in ("www.example.com", "other.example.com"):
    try:
        with socket.create_connection((name, 443), 20) as plain:
            with ssl.create_default_context(cafile=sys.argv[1]).wrap_socket(plain, server_hostname=name) as secure:
                secure.sendall(b"name\\n")
                print(secure.recv(200).decode().strip())
    except OSError as e:
        print(type(e).__name__)
for place in (("api.example.com", 80), ("10.8.8.8", 80)):
    try:
        socket.create_connection(place, 3).close()
        print(place[0])
    except OSError as e:
        print(type(e).__name__)
"""


def test_reached_hosts_are_learnt(net: Internet, tmp_path: Path, place: Path) -> None:
    home = Home(tmp_path, "debian-minimal", "python3")
    home.world.configure(uplink="eth0", resolvers=[internet.RESOLVER])
    (place / "ca.pem").write_text(net.certificate)
    command = [sys.executable, "-m", "covenant", "learn", "--no-workspace", "--read", f"{place}/ca.pem"]
    program = ["--", "python3", "-c", HOSTS, f"{place}/ca.pem"]
    found = {}
    for name, words in {
        "named": ["--net", "www.example.com", "--net", "api.example.com:80", "--net", "edge.example.net:80"],
        "role": ["--within", "operator-agent"],
        "closed": ["--within", "builder"],
    }.items():
        said = net.run("host", *command, *words, "--to", f"{tmp_path}/{name}", *program, env=home.environment())
        permissions = tomllib.loads((tmp_path / name / "agent.toml").read_text()).get("permissions", {})
        left = {one["what"] for one in json.loads((tmp_path / name / "evidence.json").read_text())["left_out"]}
        hosts = {f"{one['host']}:{one['ports'][0]}/{one['protocol']}" for one in permissions.get("network", ())}
        found[name] = said.split(), hosts, left
    said_by, hosts, left = found["named"]
    assert said_by == ["www.example.com", "gaierror", "api.example.com", "ConnectionRefusedError"]
    assert hosts == {"www.example.com:443/tls", "api.example.com:80/tcp", "edge.example.net:80/tcp"}
    assert {"other.example.com", "10.8.8.8:80/tcp"} <= left
    said_by, hosts, left = found["role"]
    assert said_by[:2] == ["www.example.com", "other.example.com"]
    assert hosts == {"www.example.com:443/tls", "other.example.com:443/tls"}
    assert "10.8.8.8:80/tcp" in left
    assert found["closed"][:2] == (["gaierror", "gaierror", "gaierror", "OSError"], set())
    again = net.run("host", *command[:3], "dev", f"{tmp_path}/role", env=home.environment())
    assert again.split()[:2] == ["www.example.com", "other.example.com"]
    assert net.leftovers() == leftovers(home.world) == []
