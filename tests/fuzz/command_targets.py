"""Calls of commands on their way: a stub's body at the gate, the gate's line at the shim, and the decision."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

from policy import errors
from policy.grants import skill_rules
from policy.grants.skills import SkillSet
from policy.manifest.tools import command
from policy.rules import command_calls
from sandbox.broker import command_calls as desk
from sandbox.network.service import commands
from sandbox.network.service.shapes import RefusedError
from tests.fuzz.drive import Target

_URI = command.uri("gh", "gh-tool")
_RULES = skill_rules.of([
    (_URI, "1", skill_rules.alternatives(one_of=["issue", "pr"])),
    (_URI, "2", skill_rules.alternatives(matches="[a-z]+")),
    (_URI, command.COUNT, skill_rules.alternatives(equals=2)),
])  # fmt: skip
_SKILLS = SkillSet.of([_URI], ["shell"], _RULES, {"calls_per_minute": 60, "argument_bytes": 64, "answer_bytes": 64})
_WORDS = (
    b".aXNzdWU=",
    b"\n",
    b" .",
    b"\\ud800",
    b'"cancel":true',
    b'"argv":[]',
    b'"stdin":"YQ=="',
    b"\\u0000",
    b"issue",
)


def body(raw: bytes) -> str:
    """A stub's body: what is read is what the same words and stdin are written as."""
    argv, stdin = commands.read(raw)
    words = b" ".join(b"." + base64.b64encode(one.encode()) for one in argv)
    assert commands.read(words + b"\n" + base64.b64encode(stdin) + b"\n") == (argv, stdin)
    assert len(argv) <= commands.ARGUMENTS
    return "called"


def line(raw: bytes) -> str:
    """A line of the gate: only two words of the right form are allowed, and a refusal's lines are one line each."""
    found = desk.read(raw)
    if found is None:
        raise errors.RequestError("it is no message of the gate")
    _, name, argv, stdin = found
    if name is None:
        return "cancelled"
    refusal = command_calls.before(_SKILLS, name, argv, len(stdin))
    if refusal is None:
        assert name == "gh"
        assert argv[0] in ("issue", "pr")
        assert argv[1].isascii()
        assert len(argv) == 2
        return "allowed"
    assert all("\n" not in one for one in refusal.add)
    assert not any(one in refusal.denial.target for one in argv if len(one) > 12)
    return refusal.denial.code


def _bodies() -> Sequence[bytes]:
    return b"\n\n", b".aXNzdWU= .bGlzdA==\nYWJj\n", b". .\n\n"


def _lines() -> Sequence[bytes]:
    calls = [
        {"id": 1, "name": "gh", "argv": ["issue", "list"], "stdin": ""},
        {"id": 2, "name": "gh", "argv": ["delete", "x", "\n[a]"], "stdin": "YQ=="},
        {"id": 3, "name": "rm", "argv": [], "stdin": ""},
        {"id": 1, "cancel": True},
    ]
    return [json.dumps(one).encode() for one in calls]


TARGETS = (
    Target("command body", body, _bodies, _WORDS, refusals=(RefusedError,), share=3),
    Target("command line", line, _lines, _WORDS, refusals=(errors.RequestError,), share=3),
    Target("command line tree", line, _lines, _WORDS, refusals=(errors.RequestError,), json=True),
)
