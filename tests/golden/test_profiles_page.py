"""docs/profiles.md lists the profiles as their data files are.

Regenerate with: PYTHONPATH=. .venv/bin/python tests/golden/test_profiles_page.py
"""

from __future__ import annotations

import pathlib
import re

from covenant.session import profiles

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "profiles.md"
_TABLE = re.compile(r"(<!-- profiles -->\n).*?(<!-- end of the profiles -->)", re.DOTALL)


def table() -> str:
    """Return the table of all profiles, as Markdown."""
    rows = [
        (
            "| profile | for | chosen for | workspace | layers | MiB of memory, scratch | processes | cpu_millis "
            "| variables |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in profiles.names():
        one = profiles.load(name)
        variables = "; ".join(
            f"`{key}={profiles.value_of(one, key)}`: {one.env[key].reason}" for key in sorted(one.env)
        )
        cells = [
            f"`{name}` {one.version}",
            one.about,
            ", ".join(f"`{command}`" for command in one.commands),
            {"": "", "directory": "this directory", "checkout": "this checkout of git"}[one.workspace],
            ", ".join(f"`{layer}`" for layer in (one.base, *one.layers)),
            f"{one.memory_mb:,}, {one.disk_mb:,}",
            str(one.pids_max),
            f"{one.cpu_millis:,}",
            variables,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def written(page: str) -> str:
    """Return the page with the table of now."""
    text, times = _TABLE.subn(lambda match: match[1] + table() + match[2], page)
    assert times == 1
    return text


def test_page_lists_profiles() -> None:
    page = PAGE.read_text()
    assert page == written(page), "regenerate docs/profiles.md (see above)"
    assert "| `shell` " in page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
