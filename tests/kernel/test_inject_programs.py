"""Programs that people use, at the gate that adds secrets: curl, git over smart HTTP, and node's fetch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.fake_host import SECRET, FakeHost
from tests.kernel.injecting import InjectWorld, carried, grants, host, net, run, world
from tests.kernel.session_kit import Home
from tests.kernel.test_credentials import vault

__all__ = ["host", "net", "world"]

PROGRAMS = ("/usr/bin/curl", "/usr/bin/git", "/usr/lib/git-core/git-remote-https", "/usr/bin/node")
EXECUTABLES = f"""
[permissions.executables]
allow = {json.dumps([*PROGRAMS, "/usr/lib/git-core/git"])}
[permissions.syscalls]
profile = "command"
"""
CODE = """
import subprocess
URL, VERSION = "https://api.example.com:4443", "%{http_code} %{http_version}"
def started(*words, **more):
    done = subprocess.run(words, capture_output=True, timeout=120, cwd="/tmp", **more)
    return [done.returncode, done.stdout.decode("latin-1"), done.stderr.decode("latin-1")]
def git(*words, at="/tmp/made"):
    named = ["-c", "user.name=Probe", "-c", "user.email=probe@example.com", "-c", "gc.auto=0"]
    return started("/usr/bin/git", *named, *(["-C", at] if at else []), *words)
FETCH = '''
const say = async (path, more) => {
  const found = await fetch("URL" + path, more);
  return [found.status, (await found.text()).length];
};
(async () => console.log(JSON.stringify([
  await say("/user"), await say("/taken", {method: "POST", body: "x".repeat(300000)}), await say("/admin"),
])))();
'''.replace("URL", URL)
upload = os.urandom(3 << 20)
answer = {
    "curl": started("/usr/bin/curl", "-sS", "-i", URL + "/user", "-H", "Authorization: Bearer mine"),
    "put": started("/usr/bin/curl", "-sS", "--data-binary", "@-", URL + "/taken", input=upload),
    "refused": started("/usr/bin/curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", URL + "/admin"),
    "http2": started("/usr/bin/curl", "-sS", "--http2", "-o", "/dev/null", "-w", VERSION, URL + "/user"),
    "node": started("/usr/bin/node", "-e", FETCH),
    "clone": git("clone", "-q", URL + "/git/repo.git", "/tmp/made", at=None),
    "read": started("/usr/bin/git", "-C", "/tmp/made", "show", "HEAD:hello"),
}
open("/tmp/made/big", "wb").write(upload)
answer["commit"] = [git("add", "big"), git("commit", "-q", "-m", "more")]
answer["push"] = git("push", "-q", "origin", "HEAD")
answer["fetch"] = git("fetch", "-q")
"""


@pytest.fixture
def repository(tmp_path: Path, host: FakeHost) -> Iterator[Path]:
    """A bare repository behind the host, which wants the secret for each request."""
    bare, work = tmp_path / "git" / "repo.git", tmp_path / "work"

    def git(*words: str | Path) -> str:
        named = ["-c", "user.name=Ann", "-c", "user.email=ann@example.com"]
        return subprocess.run(["git", *named, *map(str, words)], check=True, capture_output=True, text=True).stdout

    git("init", "-q", "-b", "main", work)
    (work / "hello").write_text("hello from the host\n")
    git("-C", work, "add", "hello")
    git("-C", work, "commit", "-q", "-m", "first")
    git("clone", "-q", "--bare", work, bare)
    git("-C", bare, "config", "http.receivepack", "true")
    host.repositories = tmp_path
    yield bare
    host.repositories = None


def test_programs_use_secrets_they_do_not_have(world: InjectWorld, host: FakeHost, repository: Path) -> None:
    paths = ("/user", "/taken", "/git/*")
    fields: dict[str, Any] = {"memory_mb": 768, "disk_mb": 64, "cpu_ms": 240_000, "resources": "pids_max = 256"}
    said, rows = run(world, CODE, grants(paths=paths) + EXECUTABLES, **fields)
    status, text, errors = said["curl"]
    assert (status, text.splitlines()[0], '"ok": true' in text) == (0, "HTTP/1.1 200 OK", True), errors
    assert said["put"][:2] == [0, str(3 << 20)], said["put"]
    assert said["refused"][:2] == [0, "403"], said["refused"]
    # Offered HTTP/2, which the gate does not speak, curl takes HTTP/1.1.
    assert said["http2"][:2] == [0, "200 1.1"], said["http2"]
    assert said["node"][0] == 0, said["node"]
    assert [one[0] for one in json.loads(said["node"][1])] == [200, 200, 403]
    assert said["clone"][0] == 0, said["clone"]
    assert said["read"][:2] == [0, "hello from the host\n"], said["read"]
    assert [one[0] for one in said["commit"]] == [0, 0], said["commit"]
    assert (said["push"][0], said["fetch"][0]) == (0, 0), (said["push"], said["fetch"])
    log = subprocess.run(["git", "-C", str(repository), "log", "--format=%s", "main"], capture_output=True, text=True)
    assert log.stdout == "more\nfirst\n"
    # Each request came with the secret, in the place of what the agent wrote; the agent never saw it.
    assert set(carried(host)) == {f"Bearer {SECRET}"}
    assert SECRET not in json.dumps(said)
    used = {row["path"] for row in rows if row["type"] == "request_injected"}
    assert {"/user", "/taken", "/git/repo.git/info/refs", "/git/repo.git/git-receive-pack"} <= used


# HTTPS of the host comes to its port of the test, as `--inject` names no port.
REDIRECTED = """table ip redirected {
	chain here {
		type nat hook prerouting priority -100;
		tcp dport 443 redirect to :4443
	}
}
"""
ASKED = """
import os, urllib.error, urllib.request
def ask(host, token):
    try:
        request = urllib.request.Request("https://" + host + "/echo", headers={"Authorization": "Bearer " + token})
        with urllib.request.urlopen(request, timeout=30) as found:
            return found.read().decode()
    except (urllib.error.URLError, OSError) as e:
        return type(e).__name__
print(ask("api.example.com", "mine"))
print(ask("other.example.com", "mine"))
print([name for name, value in os.environ.items() if "ghp_" in value])
"""


def test_session_uses_a_secret_it_does_not_have(world: InjectWorld, net: Any, host: FakeHost, tmp_path: Path) -> None:
    home = Home(tmp_path, "debian-minimal", "python3")
    shutil.copyfile(world.state / "config.toml", home.world.state / "config.toml")
    with (home.world.state / "config.toml").open() as stream:
        text = stream.read().replace(str(world.base / "vault.key"), str(tmp_path / "vault.key"))
    (home.world.state / "config.toml").write_text(text)
    vault(home.world, "init")
    vault(home.world, "put", "exec-python3", "github", secret=SECRET + "\n")
    words = ["--quiet", "--inject", "api.example.com=github", "--", "python3", "-c", ASKED]
    command = [sys.executable, "-m", "covenant", "exec", *words]
    net[0].run("world", "nft", "-f", "-", given=REDIRECTED)
    try:
        said = net[0].run("host", *command, env=home.environment())
    finally:
        net[0].run("world", "nft", "delete", "table", "ip", "redirected")
    echo, other, variables = said.splitlines()
    # The host got the secret, and the session reads stars in its place; no other host is granted.
    assert carried(host) == [f"Bearer {SECRET}"]
    assert json.loads(echo)["given"] == "Bearer " + "*" * len(SECRET)
    assert (other, variables) == ("URLError", "[]")
    assert leftovers(home.world) == []
