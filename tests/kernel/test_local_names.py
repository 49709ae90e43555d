"""The name localhost is the loopback in every run, and a granted file takes the place of ours."""

from __future__ import annotations

from pathlib import Path

from tests.kernel.world import World

LOOK = """
import socket
def looked(name):
    try:
        return sorted({one[4][0] for one in socket.getaddrinfo(name, 80)})
    except OSError as e:
        return str(e)
"""


def test_localhost_is_loopback(world: World) -> None:
    code = LOOK + "answer = [looked('localhost'), looked('other.example')]"
    loopback, other = world.ask(code)
    assert "127.0.0.1" in loopback
    assert set(loopback) <= {"127.0.0.1", "::1"}
    assert isinstance(other, str), "control: another name is not known"


def test_localhost_is_loopback_of_node(world: World) -> None:
    main = (
        "process.stdin.once('data', () => require('dns').lookup('localhost', {all: true}, (error, found) => "
        "console.log(JSON.stringify({text: String(error || found.map(one => one.address))}))));"
    )
    answer = world.run(world.sign(world.package({"main.js": main}, runtime="node", entry="main.js", memory_mb=512)))
    assert answer.result is not None, (answer.error, answer.stderr)
    assert "127.0.0.1" in answer.result.text.split(",")


def test_granted_hosts_file_takes_place_of_ours(world: World) -> None:
    more = '[permissions.filesystem]\nread = ["/etc/hosts"]\n'
    assert world.ask("answer = open('/etc/hosts').read()", more=more) == Path("/etc/hosts").read_text()
    # Control: without the grant it is ours.
    assert world.ask("answer = open('/etc/hosts').read()").startswith("127.0.0.1 localhost\n")
