"""``policy why --tool`` answers each call of the table as the guard does, and the printed line ends a refusal."""

from __future__ import annotations

import functools

import pytest

from policy.decompile import read
from policy.manifest import parse
from policy.why import amend, ask, tools
from tests import tool_call_kit as kit
from tests.unit.policy.compile import sample

CASES = tuple(kit.refused())


@functools.cache
def sight(manifest: str = kit.MANIFEST) -> ask.Sight:
    return ask.Sight(read.read(sample.compiled(parse.parse(manifest.encode())).files), (), ())


def answer(name: str, arguments: dict[str, object] | None, manifest: str = kit.MANIFEST) -> ask.Answer:
    return ask.ask(tools.CallTool(kit.uri(name), kit.tools(), arguments), sight(manifest))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_call_is_refused_by_artefacts(case: kit.Case) -> None:
    found = answer(case.tool, case.arguments)
    # The schema of a tool is in tools.json, and is no grant.
    assert found.allowed == (case.code == "schema")
    if case.fixed and found.add:
        assert answer(case.tool, case.arguments, amend.document(kit.MANIFEST, list(found.add))).allowed
    assert bool(found.add) or not case.fixed


@pytest.mark.parametrize(("name", "arguments"), kit.ALLOWED)
def test_allowed_call_is_allowed_by_artefacts(name: str, arguments: dict[str, object]) -> None:
    assert answer(name, arguments).allowed
    assert answer(name, None).allowed


def test_call_without_arguments_asks_for_any_call() -> None:
    assert answer("ruled", None).allowed
    assert not answer("ruled", {}).allowed
    assert not answer("hidden", None).allowed
