"""The maker of mutants: which faults it plants, that it plants just one, and what its page says."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
from typing import Any

import pytest

from tests.mutants import draw, operators, page, records, run, swap

SOURCE = '''\
"""A docstring."""
import re
LIMIT = 3
NAMES = ("a", "bc", "two words")
PLAIN = re.compile(r"[^a]+x{1,3}")

def decide(a: int, b: str = "x", *, c: bool = False) -> bool:
    """Another."""
    assert a
    if a < LIMIT and not c:
        raise ValueError(f"no {a + 1}")
    for one in NAMES:
        if one == b:
            continue
    return bool(a) or b in {"k"}

def items(a):
    yield a
    a.append(1)
    a[0] = min(x for x in a if x)
    return a - 1
'''


def mutants() -> dict[str, tuple[operators.Site, str]]:
    """Each site of the source by its key, with the source that it makes."""
    found = {}
    for i, site in enumerate(operators.sites("m", ast.parse(SOURCE))):
        tree = ast.parse(SOURCE)
        again = operators.sites("m", tree)[i]
        assert again.key == site.key
        again.apply()
        found[site.key] = (site, ast.unparse(ast.fix_missing_locations(tree)))
    return found


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ("compare", "if a <= LIMIT and (not c):"),
        ("compare", "if a >= LIMIT and (not c):"),
        ("compare", "if one != b:"),
        ("compare", "return bool(a) or b not in {'k'}"),
        ("boolean", "if a < LIMIT or not c:"),
        ("boolean", "if a < LIMIT:"),
        ("boolean", "if not c:"),
        ("boolean", "return bool(a)"),
        ("boolean", "if a < LIMIT and c:"),
        ("condition", "if not (a < LIMIT and (not c)):"),
        ("constant", "LIMIT = 4"),
        ("constant", "LIMIT = 2"),
        ("constant", "NAMES = ('aa', 'bc', 'two words')"),
        ("constant", "NAMES = ('a', 'b', 'two words')"),
        ("constant", "a[1] = min((x for x in a if x))"),
        ("default", "def decide(a: int, b: str='xx', *, c: bool=False) -> bool:"),
        ("default", "def decide(a: int, b: str='x', *, c: bool=True) -> bool:"),
        ("pattern", "PLAIN = re.compile('[a]+x{1,3}')"),
        ("pattern", "PLAIN = re.compile('[^a]*x{1,3}')"),
        ("pattern", "PLAIN = re.compile('[^a]+x{1,4}')"),
        ("raise", "if a < LIMIT and (not c):\n        pass"),
        ("jump", "if one == b:\n            break"),
        ("return", "return not (bool(a) or b in {'k'})"),
        ("return", "return None"),
        ("yield", "yield from ()"),
        ("delete", "yield a\n    pass"),
        ("call", "a[0] = max((x for x in a if x))"),
        ("filter", "a[0] = min((x for x in a if True))"),
        ("arithmetic", "return a + 1"),
    ],
)
def test_each_kind_of_fault_is_planted(operator: str, line: str) -> None:
    made = [text for site, text in mutants().values() if site.operator == operator]
    assert any(line in text for text in made), "\n\n".join(made)


def test_each_mutant_is_another_program_that_still_compiles() -> None:
    same = ast.unparse(ast.parse(SOURCE))
    made = [text for _, text in mutants().values()]
    for text in made:
        compile(text, "m", "exec")
        assert text != same
    assert len(set(made)) == len(made)


def test_what_is_for_people_is_left_alone() -> None:
    for _, text in mutants().values():
        assert '"""A docstring."""' in text
        assert "import re" in text
        assert "assert a" in text
        assert "'two words'" in text
        assert "raise ValueError(f'no {a + 1}')" in text or "pass" in text


def test_name_stays_when_another_function_changes() -> None:
    before = {site.key for site, _ in mutants().values() if site.scope == "items"}
    changed = SOURCE.replace("LIMIT = 3", "LIMIT = 30\nMORE = 1")
    after = {site.key for site in operators.sites("m", ast.parse(changed)) if site.scope == "items"}
    assert before == after


def test_draw_is_same_each_time_and_follows_sources() -> None:
    sites = draw.all_sites(("rules",))
    chosen = draw.drawn(sites, 50)
    assert [s.key for s in chosen] == [s.key for s in draw.drawn(draw.all_sites(("rules",)), 50)]
    assert len(chosen) == 50
    # A site more takes the place of at most one other.
    fewer = draw.drawn(sites[1:], 50)
    assert len({s.key for s in chosen} - {s.key for s in fewer}) <= 1


def results(*outcomes: str) -> list[run.Result]:
    sites = draw.all_sites(("rules",))
    return [run.Result(site, outcome, 3, 0.1) for site, outcome in zip(sites, outcomes, strict=False)]


def test_survivor_without_reason_fails_run() -> None:
    some = results(*["killed"] * 9, "survived")
    alive = some[-1].site.key
    assert page.NO_REASON in page.survivors(some, {}).lower()
    assert page.NO_REASON not in page.survivors(some, {alive: "it means the same"}).lower()
    assert any(alive in fault for fault in page.faults(some, {}))
    assert not any(alive in fault for fault in page.faults(some, {alive: "it means the same"}))


def test_too_few_and_too_many_alive_fail_run() -> None:
    few = results(*["killed"] * 10)
    assert any("at least 2000" in fault for fault in page.faults(few, {}))
    poor = results(*["killed"] * 91, *["no test"] * 9)
    assert any("91.0 %" in fault for fault in page.faults(poor, {}))
    assert page.killed_percent(results(*["timed out"], *["out of memory"])) == 100


def test_recorded_kill_counts_until_source_edit(tmp_path: pathlib.Path) -> None:
    killed, survived, died_later = some = results("killed", "survived", "survived")
    files = dict.fromkeys([one.site.module for one in some], tmp_path / "source.py")
    (tmp_path / "source.py").write_text("a = 1\n")
    sites = [one.site for one in some]

    def kills() -> list[run.Result]:
        return records.Records(tmp_path / "records.jsonl", files).kills(sites)

    assert kills() == []
    kept = records.Records(tmp_path / "records.jsonl", files)
    for one in (*some, dataclasses.replace(died_later, outcome="timed out")):
        kept.add(one)
    assert kills() == [killed, dataclasses.replace(died_later, outcome="timed out")]
    kept.add(survived)
    kept.add(dataclasses.replace(killed, outcome="survived"))
    assert [one.site.key for one in kills()] == [died_later.site.key]
    (tmp_path / "source.py").write_text("a = 2\n")
    assert kills() == []


TWO = """\
import functools

@functools.cache
def cached(a):
    return [one + 1 for one in a]

def outer():
    def inner():
        return 1
    return inner

pair = (lambda: 1, lambda: 2)
made = outer()
"""


def test_code_of_each_function_is_found_and_given(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "two.py")
    module: dict[str, Any] = {}
    exec(compile(TWO, path, "exec"), module)
    live = swap.functions_of({path})
    assert {key[1] for key in live} == {"cached", "outer", "outer.<locals>.inner", "<lambda>"}
    codes = swap.codes_of(compile(TWO.replace("return 1", "return 7").replace("one + 1", "one - 1"), path, "exec"))
    # Two lambdas on one line are not told apart, so that neither gets other code.
    assert "<lambda>" not in {key[1] for key in codes}
    assert (module["cached"]((1,)), module["made"]()) == ([2], 1)
    for key in codes.keys() & live.keys():
        for function in live[key]:
            function.__code__ = codes[key]
    module["cached"].cache_clear()
    assert (module["cached"]((1,)), module["made"](), module["outer"]()()) == ([0], 7, 7)
