"""The coordinator cuts questions where people join them, and joins answers without losing a source."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.unit import agent_modules

MAIN = Path(__file__).resolve().parents[2] / "agents" / "coordinator" / "main.py"


@pytest.fixture(scope="module")
def coordinator() -> ModuleType:
    return agent_modules.load(MAIN)


@pytest.mark.parametrize(
    ("question", "parts"),
    [
        ("who wrote tar", ["who wrote tar"]),
        ("who wrote tar and what is git?", ["who wrote tar", "what is git"]),
        ("one; two, and three. four and five", ["one", "two", "three and four and five"]),
        (" ?!; and ", []),
        ("", []),
        ("the command standard", ["the command standard"]),
    ],
)
def test_question_is_cut_where_two_are_joined(coordinator: ModuleType, question: str, parts: list[str]) -> None:
    assert coordinator.parts_of(question) == parts


def test_shelf_is_what_is_named_like_word(coordinator: ModuleType, tmp_path: Path) -> None:
    for name in ("tar", "libtar0", "git-man", "digital", "guitar"):
        (tmp_path / name).mkdir()
    (tmp_path / "tar.txt").touch()
    roots = [str(tmp_path), "/nowhere"]
    assert coordinator.shelves("Who wrote TAR or git", roots) == [f"{tmp_path}/git-man", f"{tmp_path}/tar"]
    assert coordinator.shelves("something else", roots) == []


def test_sources_stand_once_and_refusal_is_said(coordinator: ModuleType) -> None:
    answers = [
        {"ok": {"text": "a\nb", "sources": ["/x", "/y"]}},
        {"error": {"code": "rule_5_spawn_budget", "message": "full"}},
        {"ok": {"text": "c", "sources": ["/y", "/z"]}},
    ]
    assert coordinator.joined(["1", "2", "3"], answers) == {
        "text": "1\n  a\n  b\n2\n  not answered: rule_5_spawn_budget: full\n3\n  c",
        "sources": ["/x", "/y", "/z"],
    }
