"""docs/agents.md lists the cells as tests/agents/agents.toml does.

Regenerate with: PYTHONPATH=. .venv/bin/python tests/golden/test_agents_page.py
"""

from __future__ import annotations

import pathlib
import re

from covenant.session import profiles
from tests.agents import catalogue

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "agents.md"
_TABLE = re.compile(r"(<!-- cells -->\n).*?(<!-- end of the cells -->)", re.DOTALL)
_LEAST_GREEN = 34


def table() -> str:
    """Return the table of all agents, as Markdown."""
    rows = [
        f"| agent | package | program | layers | {' | '.join(catalogue.KINDS)} |",
        f"|---|---|---|---|{'---|' * len(catalogue.KINDS)}",
    ]
    for name, agent in catalogue.load().items():
        layers = (*profiles.load(agent.profile).layers, name)
        found = ((kind, agent.cell(kind)) for kind in catalogue.KINDS)
        cells = [_shown(one) if one else "not tried" if kind == "gate" else "it has none" for kind, one in found]
        packages = ", ".join(f"`{one}`" for one in agent.npm + agent.pip)
        shown = ", ".join(f"`{one}`" for one in layers)
        rows.append(
            f"| {profiles.load(agent.profile).about} | {packages} | `{agent.program}` | {shown} | {' | '.join(cells)} |"
        )
    return "\n".join(rows) + "\n"


def _shown(cell: catalogue.Cell) -> str:
    return f"{cell.expected}, by {', '.join(f'`{one}`' for one in cell.npm)}" if cell.npm else cell.expected


def written(page: str) -> str:
    """Return the page with the table of now."""
    text, times = _TABLE.subn(lambda match: match[1] + table() + match[2], page)
    assert times == 1
    return text


def test_page_lists_cells() -> None:
    page = PAGE.read_text()
    assert page == written(page), "regenerate docs/agents.md (see above)"


def test_most_cells_are_green() -> None:
    agents = catalogue.load()
    cells = [cell for agent in agents.values() for kind in catalogue.KINDS if (cell := agent.cell(kind))]
    assert len([cell for cell in cells if cell.expected == "ok"]) >= _LEAST_GREEN
    assert all(re.match(r"ok$|(refused|upstream): \S", cell.expected) for cell in cells)


def test_each_agent_has_its_profile() -> None:
    for name, agent in catalogue.load().items():
        assert agent.profile == name


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
