"""Commands: a program in a sandbox of its own reaches what its agent cannot, and takes only what the rules allow."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import internet
from tests.kernel.families import BIG, SMALL, answered, member
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.test_credentials import vault

SECRET = "s3cret-of-the-tool"
HOST = "93.184.216.34"
# A file of each Debian, in no closure.
DATA = "/usr/share/common-licenses/BSD"
TOOL = """
import os, socket, sys
with open(os.environ["CREDENTIALS_DIRECTORY"] + "/tok") as file: secret = file.read()
with socket.create_connection(("93.184.216.34", 80), 10): pass
with open(DATA) as file: data = file.readline().strip()
print(" ".join(sys.argv[1:]), "|", sys.stdin.read(), "|", secret[::-1], "|", data, "|", os.environ.get("MARK"))
print("warned", file=sys.stderr)
sys.exit(7)
"""
STDIO = '[process]\ncontract = "stdio"\n'
RIGHTS = """\
[spawn]
allowed = true
max_depth = 1
max_descendants = 2
may_grant = [
  {{ host = "93.184.216.34", ports = [80], protocol = "tcp" }},
  {{ secret = "tok" }},
  {{ read = "{data}" }},
]
[permissions.skills]
side_effects = ["shell"]
call_ms = 60000
[permissions.executables]
allow = ["/usr/bin/env"]
[[tools.command]]
name = "fetch"
agent = "fetcher"
[[tools.command.rule]]
argument = "1"
one_of = ["issue", "pr"]
{more}
"""
CALL = """
import http.client, os, socket, subprocess
def call(*words, stdin=b"", name="fetch"):
    done = subprocess.run([name, *words], input=stdin, capture_output=True, env={**os.environ, "MARK": "agent"})
    return [done.returncode, done.stdout.decode(), done.stderr.decode()]
def call_at(method, path, body=".", **headers):
    line = http.client.HTTPConnection("tools.covenant", timeout=20)
    headers["Content-Type"] = "application/x-covenant-command"
    line.request(method, path, body + "\\n\\n" * (body == "."), headers)
    answer = line.getresponse()
    return [answer.status, answer.read().decode()]
def own():
    try: return socket.create_connection(("93.184.216.34", 80), 5).fileno()
    except OSError as e: return type(e).__name__
def listed(path):
    try: return os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError as e: return type(e).__name__
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, warm: Path, net: Internet) -> Iterator[NetworkedWorld]:
    base = tmp_path_factory.mktemp("commands")
    world = internet.configured(NetworkedWorld(base, warm=warm), net)
    with (world.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{world.base}/vault.key"\n')
    vault(world, "init")
    vault(world, "put", "fetcher", "tok", secret=SECRET)
    network = internet.entries((HOST, "[80]", "tcp"))
    more = f'{STDIO}[permissions.filesystem]\nread = ["{DATA}"]\n[permissions.credentials]\n'
    more += 'grants = ["tok"]\nfiles = true\n'
    text = TOOL.replace("DATA", repr(DATA))
    path = world.package({"main.py": text}, name="fetcher", id="fetcher", network="full", more=network + more, **SMALL)
    world.sign(path)
    yield world
    assert net.leftovers() == []


def agent(world: NetworkedWorld, code: str, more: str = "") -> Any:
    rights = RIGHTS.format(data=DATA, more=more)
    return answered(world, member(world, "top", CALL + textwrap.dedent(code), more=rights, **BIG))


def test_command_reaches_what_agent_cannot(made: NetworkedWorld) -> None:
    code = """
    answer = {
        "allowed": call("issue", stdin=b"given"),
        "refused": call("delete"),
        "more": call("issue", "x"),
        "plain": ask("spawn", agent="fetcher", text="delete"),
        "other": call_at("POST", "/command/other"), "odd": call_at("POST", "/command/fetch", "no base64"),
        "page": call_at("POST", "/command/fetch", "\\n\\n", Origin="http://tools.covenant"),
        "mcp": call_at("POST", "/mcp"),
        "own": own(),
        "data": listed(DATA),
        "secrets": os.environ.get("CREDENTIALS_DIRECTORY"),
        "asked": ask("credential", name="tok"),
    }
    """.replace("DATA", repr(DATA))
    found = agent(made, code)
    seen = f"issue | given | {SECRET[::-1]} | Copyright (c) The Regents of the University of California. | None\n"
    assert found["allowed"] == [7, seen, "warned\n"]
    status, out, error = found["refused"]
    assert (status, out) == (126, "")
    assert "[arguments]" in error or "arguments" in error
    assert 'argument = "1"\nequals = "delete"' in error
    assert found["more"][0] == 126
    # Around the rules: the same package by a plain spawn, another name, another form.
    assert found["plain"]["error"]["code"] == "wrong_contract"
    assert found["other"][0] == 200
    assert found["other"][1].startswith("126\n\n")
    assert found["odd"][0] == 400
    assert found["page"][0] == 405
    assert found["mcp"][0] in (400, 404)
    assert found["own"] in ("PermissionError", "OSError", "ConnectionRefusedError")
    assert found["data"] == "FileNotFoundError"
    assert found["secrets"] is None
    assert "error" in found["asked"]
    assert SECRET not in json.dumps(found)
    kinds = [row["kind"]["type"] for row in made.rows()]
    assert kinds.count("tool_called") == kinds.count("tool_answered") == 1
    assert kinds.count("tool_refused") == 3
    assert SECRET not in json.dumps(made.rows())


def test_line_of_a_refusal_ends_it(made: NetworkedWorld) -> None:
    lines = '[[tools.command.rule]]\nargument = "1"\nequals = "delete"\n'
    found = agent(made, 'answer = call("delete")', more=lines)
    assert found[0] == 7
