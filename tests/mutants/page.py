"""docs/mutants.md and mutants-survivors.md: the mutants tried, those noticed, and why each survivor may live."""

from __future__ import annotations

import pathlib
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.mutants import draw
from tests.mutants.run import Result

PAGE = draw.ROOT / "docs" / "mutants.md"
SURVIVORS = draw.ROOT / "docs" / "mutants-survivors.md"
REASONS = pathlib.Path(__file__).resolve().parent / "reasons.toml"
NO_REASON = "no reason yet"
LEAST_DRAWN, LEAST_KILLED_PERCENT = 2000, 92

_HEAD = """\
# Mutants: how good the tests of the deciding half are

<!-- Made by `make mutants`; the reasons are written by hand in tests/mutants/reasons.toml. -->

This page measures the tests of `policy/`, the half of the program that decides. A mutant is the program with one small
fault: a comparison turned, a bound off by one, a condition negated, a check that does not raise.

```sh
make mutants
.venv/bin/python -m tests.mutants --records FILE  # continues an earlier run with this file
```

Each mutant meets the tests of `tests/unit/policy`, `tests/property` and `tests/golden` that run its line. It is killed
when a test fails, hangs or runs out of memory, and survives otherwise. A hash draws a fixed share of all possible
places, so the same source gives the same mutants, and an edit moves only its own. The fastest tests run first, with
few fixed examples and within a time limit, so the score is a lower bound.
[mutants-survivors.md](mutants-survivors.md) has the reason of each survivor.
"""

_SURVIVORS_HEAD = """\
# Mutants that survive, and why

<!-- Made by `make mutants`; the reasons are written by hand in tests/mutants/reasons.toml. -->

Each survivor of [mutants.md](mutants.md) below its reason: its name, its place in `policy/`, the kind of fault and the
change. A name stays as long as its statement does. For example, `constant: 0 to 1` replaces a 0 by a 1.
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


def page(results: Sequence[Result], possible: int) -> str:
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
    return "\n".join(lines) + "\n"


def survivors(results: Sequence[Result], why: Mapping[str, str]) -> str:
    """Return the page of survivors, in groups of one reason."""
    groups: dict[str, list[str]] = {}
    for result in results:
        if result.survived:
            groups.setdefault(why.get(result.site.key, NO_REASON), []).append(_row(result))
    return grouped(groups)


def grouped(groups: Mapping[str, Sequence[str]]) -> str:
    """Return the page for the rows of each reason."""
    lines = [_SURVIVORS_HEAD]
    for reason, rows in sorted(groups.items()):
        lines += [f"**{reason[:1].upper()}{reason[1:]}**", "", *rows, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _room(result: Result) -> str:
    return result.site.module.split(".")[1]


def _row(result: Result) -> str:
    site = result.site
    where = f"{site.module.removeprefix('policy.')} {site.scope}".strip()
    return f"- `{site.key}` {where}: {site.operator}: {_code(site.before)} to {_code(site.after)}"


def _code(text: str) -> str:
    """Return source as code: backticks that it contains do not end it."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


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
