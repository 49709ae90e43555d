"""docs/mutants.md: the mutants tried, those noticed, and the reason why each survivor may live."""

from __future__ import annotations

import pathlib
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.mutants import draw
from tests.mutants.run import Result

PAGE = draw.ROOT / "docs" / "mutants.md"
REASONS = pathlib.Path(__file__).resolve().parent / "reasons.toml"
NO_REASON = "no reason yet"
LEAST_DRAWN, LEAST_KILLED_PERCENT = 2000, 92

_HEAD = """\
# Mutants: how good the tests of the deciding half are

<!-- Made by `make mutants`; the reasons are written by hand in tests/mutants/reasons.toml. -->

A mutant is the program with one small fault planted in it: a comparison turned, a bound off by one, a condition
negated, a check that does not raise. The tests of `tests/unit/policy`, `tests/property` and `tests/golden` are run
against each; a mutant that makes a test fail, hang or run out of memory was noticed (killed), one that no test notices
survived. Of all places where one can stand, a fixed share is drawn by a hash, so that the same source gives the same
mutants and an edit moves only its own. A mutant meets the tests that run its line, the fastest first, with few
and fixed generated examples, and within a bound of time: the score is therefore a floor.

```sh
make mutants
.venv/bin/python -m tests.mutants --records FILE  # goes on where an earlier run with this file ended
```
"""


def reasons(path: pathlib.Path = REASONS) -> dict[str, str]:
    """Reason by mutant. Raises ValueError for a mutant that has two."""
    found: dict[str, str] = {}
    for entry in tomllib.loads(path.read_text()).get("reason", ()):
        for key in entry["ids"]:
            if key in found:
                raise ValueError(f"mutant {key} has two reasons")
            found[key] = entry["text"]
    return found


def killed_percent(results: Sequence[Result]) -> float:
    """The share that was noticed, of 100."""
    return 100 * sum(not r.survived for r in results) / len(results)


def page(results: Sequence[Result], possible: int, why: Mapping[str, str]) -> str:
    """The page for these results out of ``possible`` places."""
    lines = [_HEAD]
    lines.append(f"Drawn {len(results)} of {possible}; {killed_percent(results):.1f} % killed.\n")
    lines += ["| part | drawn | killed | survived | killed % |", "|---|---|---|---|---|"]
    for room in draw.ROOMS:
        mine = [r for r in results if _room(r) == room]
        if mine:
            alive = sum(r.survived for r in mine)
            percent = f"{killed_percent(mine):.1f}"
            lines.append(f"| policy/{room} | {len(mine)} | {len(mine) - alive} | {alive} | {percent} |")
    ways = Counter(r.site.operator for r in results)
    alive_by = Counter(r.site.operator for r in results if r.survived)
    lines += ["", "| kind of fault | drawn | survived |", "|---|---|---|"]
    lines += [f"| {way} | {number} | {alive_by[way]} |" for way, number in sorted(ways.items())]
    lines += ["", "## Survivors", ""]
    lines += ["Each by a name that stays as long as its statement does.", ""]
    for room in draw.ROOMS:
        mine = [r for r in results if _room(r) == room and r.survived]
        if mine:
            lines += [f"### policy/{room}", "", "| mutant | where | what | why it lives |", "|---|---|---|---|"]
            lines += [_row(r, why.get(r.site.key, NO_REASON)) for r in mine]
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _room(result: Result) -> str:
    return result.site.module.split(".")[1]


def _row(result: Result, reason: str) -> str:
    site = result.site
    where = f"{site.module.removeprefix('policy.')} {site.scope}".strip()
    return f"| `{site.key}` | {where} | {site.operator}: {_code(site.before)} to {_code(site.after)} | {reason} |"


def _code(text: str) -> str:
    """Source in a cell of a table: backticks that it holds do not end it, nor do bars end the cell."""
    shown = text.replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def faults(results: Sequence[Result], why: Mapping[str, str]) -> list[str]:
    """Return the faults of the run: too few mutants, too many survivors, a survivor without a reason."""
    found = []
    if len(results) < LEAST_DRAWN:
        found.append(f"only {len(results)} mutants were drawn, at least {LEAST_DRAWN} are due")
    if killed_percent(results) < LEAST_KILLED_PERCENT:
        found.append(f"{killed_percent(results):.1f} % were killed, at least {LEAST_KILLED_PERCENT} % are due")
    unexplained = [r.site.key for r in results if r.survived and r.site.key not in why]
    if unexplained:
        found.append(f"{len(unexplained)} survivors have no reason: {' '.join(unexplained)}")
    return found
