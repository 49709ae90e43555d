"""Patterns of a workspace: which paths each names."""

from __future__ import annotations

import time

import pytest
from pydantic_core import PydanticCustomError

from policy import data
from policy.manifest import workspace
from policy.workspace import globs


@pytest.mark.parametrize(
    ("pattern", "named", "other"),
    [
        (".env", [".env", "a/.env", "a/b/.ENV"], [".envrc", "a.env", ".env/x"]),
        ("*.pem", ["x.pem", "a/x.pem"], ["x.pem/y", "pem"]),
        ("a/*.txt", ["a/x.txt"], ["b/a/x.txt", "a/b/x.txt", "x.txt"]),
        ("**/.git/hooks/**", [".git/hooks", ".git/hooks/x", "m/.git/hooks/a/b"], [".git/hook", "x.git/hooks/y"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["a/xb", "b", "a/b/c"]),
        ("a?", ["ab", "x/ab"], ["a", "abc", "a/"]),
        ("x.y", ["x.y"], ["xzy"]),
    ],
)
def test_pattern_names_paths(pattern: str, named: list[str], other: list[str]) -> None:
    match = globs.matching((workspace.pattern(pattern),))
    assert [path for path in named if not match(path)] == []
    assert [path for path in other if match(path)] == []


def test_no_pattern_names_nothing() -> None:
    assert globs.matching(())("a") is None
    assert globs.matching(())("") is None


@pytest.mark.parametrize(
    "pattern", ["", "/a", "a/", "a//b", "./a", "a/../b", "a**", "**a/b", "[ab]", "{a,b}", "a\\b", "\n"]
)
def test_pattern_of_another_form_is_refused(pattern: str) -> None:
    with pytest.raises(PydanticCustomError):
        workspace.pattern(pattern)


def test_built_in_patterns_are_patterns_with_reasons() -> None:
    files = data.workspace_files()
    for pattern, reason in {**files.mask, **files.protect}.items():
        assert workspace.pattern(pattern) == pattern
        assert reason
    assert not set(files.mask) & set(files.protect)


@pytest.mark.parametrize(
    "path",
    [
        *(".git/hooks/pre-commit", ".git/hooks", ".git/config", "sub/.git/config", ".git/modules/a/b/config"),
        *(".claude/settings.json", ".codex/config.toml", "AGENTS.md", "docs/CLAUDE.md", ".vscode/tasks.json"),
        *(".github/workflows/ci.yml", ".envrc", ".GIT/CONFIG", ".mcp.json", ".git/info/attributes"),
    ],
)
def test_file_that_starts_programs_is_protected(path: str) -> None:
    assert globs.matching(tuple(data.workspace_files().protect))(path)


@pytest.mark.parametrize("path", ["src/a.py", "README.md", ".git/HEAD", ".git/objects/aa/bb", "config", ".gitignore"])
def test_other_file_is_not_protected(path: str) -> None:
    assert not globs.matching(tuple(data.workspace_files().protect))(path)


def test_last_names_leave_no_path_out() -> None:
    patterns = tuple(data.workspace_files().mask)
    found = globs.last_names(patterns)
    assert found is not None
    match = globs.matching(patterns)
    for path in (".env", "a/.ENV", "x.Pem", "a/.git/credentials", ".docker/config.json", ".env.local", "b/id_rsa"):
        assert match(path)
        assert found.may_be(path.rpartition("/")[2].lower())
    assert not found.may_be("a.py")
    assert [globs.last_names((other,)) for other in ("a/**", "x?", "a*b*c", "*", "*a*")] == [None] * 5


def test_time_is_linear_in_path() -> None:
    match = globs.matching(("**/a/**/a/**/a/**/b", "*a*a*a*a*a*b"))
    began = time.process_time()
    assert not match("a/" * 2_000 + "a" * 2_000)
    assert time.process_time() - began < 1.0
