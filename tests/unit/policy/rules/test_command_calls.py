"""Calls of commands: what rules take, and that the lines of a refusal end it."""

from __future__ import annotations

import pytest

from policy import data, errors
from policy.decompile import read
from policy.denials import Denial
from policy.grants.skills import SkillSet
from policy.manifest.tools import command
from policy.rules import command_calls, nine
from policy.why import ask, denied, kernel, tools
from tests.unit.policy.compile import sample

NEEDS = '[permissions.skills]\nside_effects = ["shell"]\n[spawn]\nallowed = true\nmax_depth = 1\nmax_descendants = 1\n'
TOOL = '[[tools.command]]\nname = "gh"\nagent = "gh-tool"\n'
BELOW = '# below [[tools.command]] with name = "gh"'
ISSUE = '[[tools.command.rule]]\nargument = "1"\none_of = ["issue", "pr"]\n'


def _skills(rules: str) -> SkillSet:
    return nine.requested(sample.manifest(more=NEEDS + TOOL + rules), roles=data.roles()).skills


@pytest.mark.parametrize(
    ("rules", "argv", "taken"),
    [
        ("", [], True),
        ("", ["issue"], False),
        (ISSUE, ["issue"], True),
        (ISSUE, [], False),
        (ISSUE, ["issue", "list"], False),
        (ISSUE, ["delete"], False),
        ('[[tools.command.rule]]\nargument = "argv"\nmatches = "[a-z-]+"\n', ["a", "--b"], True),
        ('[[tools.command.rule]]\nargument = "argv"\nmatches = "[a-z-]+"\n', ["a", "B"], False),
        ('[[tools.command.rule]]\nargument = "line"\nequals = "a \'b c\'"\n', ["a", "b c"], True),
        ('[[tools.command.rule]]\nargument = "line"\nequals = "a \'b c\'"\n', ["a", "b", "c"], False),
        ('[[tools.command.rule]]\nargument = "line"\nmatches = ".*"\n', [], True),
        (ISSUE + '[[tools.command.rule]]\nargument = "argv"\nmatches = ".*"\n', ["issue", "x", "y"], True),
        (ISSUE + '[[tools.command.rule]]\nargument = "argv"\nmatches = ".*"\n', ["x", "issue"], False),
    ],
)
def test_rules_take_what_they_say(rules: str, argv: list[str], *, taken: bool) -> None:
    assert (command_calls.before(_skills(rules), "gh", argv, 0) is None) == taken


@pytest.mark.parametrize("rules", ["", ISSUE, '[[tools.command.rule]]\nargument = "argv"\nequals = "a"\n'])
@pytest.mark.parametrize("argv", [["delete"], ["issue", "list"], ["delete", "it's", 'a "quote" \\ '], ["x", "x"]])
def test_lines_of_refusal_end_it(rules: str, argv: list[str]) -> None:
    refusal = command_calls.before(_skills(rules), "gh", argv, 0)
    if refusal is None:
        pytest.fail("nothing is refused")
    wider = rules + "\n".join(refusal.add) + "\n"
    assert command_calls.before(_skills(wider), "gh", argv, 0) is None


def test_unknown_command_and_size_are_refused() -> None:
    skills = _skills("")
    unknown = command_calls.before(skills, "curl", [], 0)
    assert unknown is not None
    assert unknown.denial.code == "not_granted"
    large = command_calls.before(skills, "gh", [], 65_537)
    assert large is not None
    assert large.add == ("[permissions.skills]", "argument_bytes = 65537")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TOOL, "spawn.allowed is `false`"),
        (NEEDS.replace('"shell"', '"read"') + TOOL, "class `shell` is not granted"),
        (NEEDS + TOOL + TOOL, "listed twice"),
        (NEEDS + TOOL + ISSUE + ISSUE, "written twice"),
        (NEEDS + TOOL + ISSUE.replace('"1"', '"2"'), "argument 1 has none"),
        (NEEDS + TOOL + ISSUE.replace('"1"', '"65"'), "`65`"),
        (NEEDS + TOOL + '[[tools.command.rule]]\nargument = "1"\n', "no condition"),
        (NEEDS.replace("side", f'allow = ["{command.uri("gh", "x")}"]\nside'), "by [[tools.command]] alone"),
    ],
)
def test_manifest_that_grants_no_command_is_refused(text: str, said: str) -> None:
    with pytest.raises(errors.ManifestError) as caught:
        sample.manifest(more=text)
    assert said in str(caught.value)


def test_another_package_is_another_grant() -> None:
    mine = _skills(ISSUE)
    other = nine.requested(sample.manifest(more=NEEDS + TOOL.replace("gh-tool", "other") + ISSUE), roles=data.roles())
    assert not other.skills.is_subset(mine)
    assert _skills(ISSUE.replace(', "pr"', "")).is_subset(mine)
    assert not _skills('[[tools.command.rule]]\nargument = "argv"\nmatches = ".*"\n').is_subset(mine)


@pytest.mark.parametrize(
    ("name", "argv", "allowed", "add"),
    [
        ("gh", ("issue",), True, ()),
        ("gh", None, True, ()),
        ("gh", ("delete",), False, (BELOW, "[[tools.command.rule]]", 'argument = "1"', 'equals = "delete"')),
        ("curl", None, False, ("[[tools.command]]", 'name = "curl"', 'agent = "AGENT_ID"')),
    ],
)
def test_why_names_rule_or_lines(name: str, argv: tuple[str, ...] | None, allowed: bool, add: tuple[str, ...]) -> None:
    other = TOOL.replace('"gh', '"jq')
    manifest = sample.manifest(more=NEEDS + TOOL + ISSUE + other)
    found = read.read(sample.compiled(manifest, sample.host()).files)
    answer = ask.ask(tools.CallCommand(name, argv), ask.Sight(found, manifest=manifest))
    assert (answer.allowed, answer.add) == (allowed, add)
    assert not allowed or "agent `gh-tool` runs beside it, with 1 = " in answer.because


def test_why_tells_what_children_may_be_given() -> None:
    rights = 'may_grant = [{ host = "api.example.com", ports = [443], protocol = "tls" }]\n'
    found = read.read(sample.compiled(sample.manifest(more=NEEDS + rights), sample.host()).files)
    for host, said in (("api.example.com", True), ("www.example.com", False)):
        answer = ask.ask(kernel.Connect(host, 443), ask.Sight(found))
        assert not answer.allowed
        assert answer.because.endswith("its children may be given it (spawn.may_grant)") == said


def test_denial_of_command_names_its_table() -> None:
    sight = ask.Sight(read.read(sample.compiled(sample.manifest(more=NEEDS + TOOL + ISSUE), sample.host()).files))
    target = f"{command.uri('gh', 'gh-tool')} 1"
    told = denied.explain(Denial("tool", target, "arguments"), sight)
    assert 'add [[tools.command.rule]] below gh with argument = "1"' in str(told)
