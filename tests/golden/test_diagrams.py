"""The diagrams of the pages are pictures of their texts, and that of a run's states is of the table.

Make them anew with: .venv/bin/python scripts/diagrams
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import pathlib
import re

from policy import lifecycle
from sandbox.network.gate import uids

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLACE = ROOT / "docs" / "diagrams"
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


def _imports() -> tuple[set[str], set[tuple[str, str]]]:
    """Return the rooms of the three packages, and which imports which within its package. Names are PACKAGE.ROOM."""
    modules = {"covenant": "daemon", "sandbox": "supervisor doctor", "policy": "decide"}
    rooms = {f"{top}.{one.parent.name}" for top in modules for one in (ROOT / top).glob("*/__init__.py")}
    rooms |= {f"{top}.{name}" for top, names in modules.items() for name in names.split()}
    found = set()
    for top in modules:
        for path in (ROOT / top).rglob("*.py"):
            # daemon_stores.py and its like are parts of the daemon, and doctor_network.py of the doctor.
            within = path.relative_to(ROOT / top).parts
            source = within[0] if len(within) > 1 else path.stem.partition("_")[0]
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                    targets = {".".join(name.split(".")[:2]) for name in names}
                    found |= {(f"{top}.{source}", target) for target in targets if target.startswith(f"{top}.")}
    return rooms, {(a, b) for a, b in found if a != b and {a, b} <= rooms}


def _drawn() -> tuple[set[str], set[tuple[str, str]]]:
    """Return the rooms and the arrows of the diagram, named as ``_imports`` does. Arrows between packages are left out.

    ``workspaces`` is the id of policy's room `workspace`: the sandbox has one of that name.
    """
    package, arrows = {}, set()
    for line in (PLACE / "rooms.dot").read_text().splitlines():
        if (cluster := re.search(r'subgraph cluster_(\w+) \{ label="[^"]*"; (.*) \}', line)) is not None:
            for name in re.findall(r"(\w+)(?: \[[^]]*\])?;", cluster[2]):
                package[name] = f"{cluster[1]}.{name.replace('workspaces', 'workspace')}"
        elif "->" in line and "lhead" not in line:
            for chain in line.strip().split(";"):
                groups = [re.findall(r"\w+", part) for part in chain.split("->")]
                for first, second in itertools.pairwise(groups):
                    arrows |= {(package[a], package[b]) for a in first for b in second}
    return set(package.values()), arrows


def test_rooms_and_arrows_are_those_of_code() -> None:
    (rooms, imports), (drawn, arrows) = _imports(), _drawn()
    assert drawn == rooms
    assert arrows - imports == set()
    reached = set(arrows)
    while more := {(a, d) for a, b in reached for c, d in arrows if b == c} - reached:
        reached |= more
    assert imports - reached == set()


def test_each_process_beside_runs_is_drawn_with_its_uid() -> None:
    drawn = (PLACE / "gates.dot").read_text() + (PLACE / "boundaries.dot").read_text()
    known = {value for name, value in vars(uids).items() if name.isupper() and isinstance(value, int)}
    assert {int(number) for number in re.findall(r"(?<!\d)649\d\d(?!\d)", drawn)} == known


def test_each_picture_is_of_its_text() -> None:
    texts = sorted(PLACE.glob("*.dot"))
    assert len(texts) >= 6
    for text in texts:
        first, _, svg = text.with_suffix(".svg").read_text().partition("\n")
        assert first == f"<!-- of {text.name}, sha256 {hashlib.sha256(text.read_bytes()).hexdigest()} -->", text.name
        assert svg.startswith("<svg")
        assert not re.search(r"<script|(?:href|src)=[\"'](?!#)", svg)


def test_each_picture_stands_on_a_page() -> None:
    shown = {name for page in PAGES.glob("*.md") for name in re.findall(r"\]\(diagrams/(\w+\.svg)\)", page.read_text())}
    assert shown == {one.name for one in PLACE.glob("*.svg")}
