"""The diagrams of the pages are pictures of their texts, and that of a run's states is of the table.

Make them anew with: .venv/bin/python scripts/diagrams
"""

from __future__ import annotations

import hashlib
import pathlib
import re

from policy import lifecycle

PLACE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "diagrams"
PAGES = PLACE.parent


def states() -> str:
    """Return the text of the diagram of a run's states."""
    rows = [f'  {one.source or "new"} -> {one.target} [label="{_folded(one.when)}"];' for one in lifecycle.TRANSITIONS]
    final = " ".join(sorted(lifecycle.FINAL))
    return "\n".join(
        [
            "// The states of a run. Made from policy/lifecycle.py by scripts/diagrams; do not edit.",
            "digraph states {",
            f"  rankdir=TB; nodesep=1.4; new [shape=point]; {{{final}}} [shape=oval];".replace("{{", "{").replace(
                "}}", "}"
            ),
            *rows,
            "}\n",
        ]
    )


def _folded(text: str) -> str:
    """Break a long text into lines, and escape it."""
    lines = [""]
    for word in re.sub(r"[`\"]", "'", text).split():
        if len(lines[-1]) + len(word) > 26:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\\n".join(lines)


def test_states_are_those_of_table() -> None:
    assert (PLACE / "states.dot").read_text() == states()


def test_each_picture_is_of_its_text() -> None:
    texts = sorted(PLACE.glob("*.dot"))
    assert len(texts) >= 5
    for text in texts:
        first, _, svg = text.with_suffix(".svg").read_text().partition("\n")
        assert first == f"<!-- of {text.name}, sha256 {hashlib.sha256(text.read_bytes()).hexdigest()} -->", text.name
        assert svg.startswith("<svg")
        assert not re.search(r"<script|(?:href|src)=[\"'](?!#)", svg)


def test_each_picture_stands_on_a_page() -> None:
    shown = {name for page in PAGES.glob("*.md") for name in re.findall(r"\]\(diagrams/(\w+\.svg)\)", page.read_text())}
    assert shown == {one.name for one in PLACE.glob("*.svg")}
