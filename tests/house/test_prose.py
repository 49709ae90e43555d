"""The rules of writing that a program can check hold, and each check finds a planted fault."""

from __future__ import annotations

import subprocess

import pytest

from tests.house import prose


def test_docstrings_and_comments_name_their_subject() -> None:
    assert prose.all_findings() == []


@pytest.mark.parametrize("room", prose.ROOMS)
def test_room_has_one_class_of_name(room: str) -> None:
    assert prose.twins_of(room) == {}


def test_commit_subjects_have_area_and_imperative() -> None:
    assert prose.wrong_subjects(prose.subjects_since_the_rules()) == []


def test_glossary_explains_each_term_in_one_line() -> None:
    lines = (prose.ROOT / "docs/glossary.md").read_text().splitlines()
    terms = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]
    assert set(TERMS) <= set(terms)
    assert terms == sorted(terms, key=str.lower)


TERMS = (
    *("agent", "attestation", "caller", "denial", "drift", "envelope", "gate", "gateway", "layer", "lease", "manifest"),
    *("operator", "package", "root image", "run", "sandbox", "session", "shim", "standby", "supervisor", "trust root"),
    "workspace",
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What it is."""', [(1, "opening", "What")]),
        ('"""Read it.\n\nIt waits for whoever asks."""', [(1, "vague", "whoever")]),
        ('def f():\n    """Of those, the first."""', [(2, "opening", "Of")]),
        ('def f() -> str:\n    """Whether it is."""', [(2, "opening", "Whether")]),
        ('def f() -> bool:\n    """Whether it is."""', []),
        ('class A:\n    x: bool\n    """Whether it is."""\n    y: int\n    """Who asked."""', [(5, "opening", "Who")]),
        ("x = 1  # Nobody reads it", [(1, "vague", "Nobody")]),
        ('x = "nobody"', []),
        ('"""Offer it."""', []),
        ('"""Whatever it is."""', [(1, "vague", "Whatever")]),
    ],
)
def test_each_rule_finds_planted_fault(source: str, expected: list[tuple[int, str, str]]) -> None:
    assert prose.findings(source) == expected


def test_two_classes_of_one_name_are_found() -> None:
    sources = {"a.py": "class Run: ...\nclass _Own: ...", "b.py": "class Run: ...\nclass _Own: ..."}
    assert prose.twins(sources) == {"Run": ["a.py", "b.py"]}


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("shim: keep the exit status", False),
        ("sandbox/serve, docs: end a hung request", False),
        ("Let a run end", True),
        ("shim: " + "x" * 70, True),
        ("Merge branch 'x'", False),
    ],
)
def test_wrong_subjects_are_found(subject: str, wrong: bool) -> None:
    assert bool(prose.wrong_subjects([subject])) == wrong


def test_rules_begin_at_commit_of_this_history() -> None:
    shallow = subprocess.run(
        ["git", "-c", "safe.directory=*", "rev-parse", "--is-shallow-repository"],
        cwd=prose.ROOT,
        capture_output=True,
        text=True,
    )
    if shallow.stdout.strip() == "false":
        assert prose.subjects_since_the_rules(), "no commit since RULES_SINCE: is the hash right?"
