"""The stub of a root with layers: bash asks for the command, also where a layer has a program of that name."""

from __future__ import annotations

from pathlib import Path

from sandbox.layers import sources
from sandbox.layers.store import LayerStore
from tests.kernel.families import BIG, SMALL
from tests.kernel.world import World

TOOL = """
import sys
given = sys.stdin.buffer.read()
sys.stdout.buffer.write(repr(sys.argv[1:]).encode() + b" " + given[::-1])
print("\\u00fcml\\u00e4ut", file=sys.stderr)
sys.exit(len(sys.argv))
"""
MANIFEST = """\
[process]
contract = "text"
args = ["-c", '''{script}''']
[root]
layers = ["{layer}"]
[permissions.executables]
allow = ["root"]
[spawn]
allowed = true
max_depth = 1
max_descendants = 1
[permissions.skills]
side_effects = ["shell"]
[[tools.command]]
name = "git"
agent = "tool"
[[tools.command.rule]]
argument = "line"
matches = ".*"
"""
SCRIPT = """
printf "a\\0b" | git "two words" "" "*" 2>/tmp/err; echo " $?"
cat /tmp/err
git </dev/null 2>/dev/null; echo " $?"
head -c 300000 /dev/zero | git big 2>&1; echo $?
"""


def test_bash_passes_streams_and_status(world: World, tmp_path: Path) -> None:
    layer = str(sources.build(LayerStore(world.state), "debian-minimal", []).ref)
    stdio = '[process]\ncontract = "stdio"\n'
    world.sign(world.package({"main.py": TOOL}, name="tool", id="tool", more=stdio, **SMALL))
    more = MANIFEST.format(script=SCRIPT, layer=layer)
    path = world.package({"readme": ""}, name="top", id="top", runtime="command", entry="bash", more=more, **BIG)
    answer = world.run(world.sign(path))
    assert answer.result is not None, (answer.error, answer.stderr)
    lines = answer.result.text.split("\n")
    assert lines[0] == "['two words', '', '*'] b\0a 4"
    assert lines[1] == "ümläut"
    assert lines[2] == "[]  1"
    assert "argument_bytes" in answer.result.text
    assert lines[-2] == "126"
