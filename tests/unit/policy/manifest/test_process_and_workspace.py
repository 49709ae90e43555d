"""``[process]`` and ``[workspace]``: which variables, patterns and sizes a manifest may name."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from pydantic_core import PydanticCustomError

from policy import errors
from policy.manifest import parse, process, workspace

HEAD = (
    '[agent]\nid = "a"\nname = "a"\nversion = "1"\nruntime = "python3"\nentry = "main.py"\n'
    '[resources]\ndisk_mb = 64\n[sandbox]\nrequired = true\nbackend = "linux-gvisor"\nfilesystem = "ephemeral"\n'
)


def refused_env(name: str, contract: str) -> bool:
    text = f'{HEAD}[process]\ncontract = "{contract}"\nenv = {{ {name} = "x" }}\n'
    try:
        return dict(parse.parse(text.encode()).process.env) != {name: "x"}
    except errors.ManifestError as e:
        return name in str(e)


@pytest.mark.parametrize("name", ["COVENANT_RUN_ID", "CREDENTIALS_DIRECTORY", "LD_AUDIT", "LD_PRELOAD", "TMPDIR"])
def test_no_manifest_sets_names_of_the_run(name: str) -> None:
    assert refused_env(name, "text")
    assert refused_env(name, "line")
    assert not refused_env(name[:-1], "text")


@pytest.mark.parametrize(
    "name",
    ["LD_LIBRARY_PATH", "LD_X", "PYTHON", "PYTHONPATH", "NODE_OPTIONS", "GCONV_PATH", "GLIBC_TUNABLES", "GCONV_PATHS"],
)
def test_line_contract_keeps_names_of_loaders(name: str) -> None:
    assert refused_env(name, "line")
    assert not refused_env(name, "text")
    assert not refused_env(f"X{name}", "line")


@pytest.mark.parametrize("name", ["LD", "PYTHO", "NODE", "GCONV_PAT", "GLIBC_TUNABLE", "LOG_LEVEL"])
def test_line_contract_gives_other_names(name: str) -> None:
    assert not refused_env(name, "line")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (["A=x"], "is no table"),
        ("A=x", "is no table"),
        ({"1A": "x"}, "is not accepted"),
        ({"A-B": "x"}, "is not accepted"),
        ({"A" * 129: "x"}, "is not accepted"),
        ({"A": 1}, "variable `A` is"),
        ({"A": "\x1b"}, ""),
        ({"A": "x" * 16_385}, "has 16385 characters"),
        ({f"A{number}": "x" for number in range(1025)}, "has 1025 variables"),
    ],
)
def test_environment_of_another_form_is_refused(env: Any, says: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        process.Process.model_validate({"env": env})
    (error,) = caught.value.errors()
    assert says in error["ctx"]["message"]


def test_environment_is_kept_sorted() -> None:
    assert process.Process.model_validate({"env": {"B": "x" * 16_384, "A" * 128: "\n\t"}}).env == (
        ("A" * 128, "\n\t"),
        ("B", "x" * 16_384),
    )
    read = process.Process(env=(("A", "1"),))
    assert read.env == (("A", "1"),)
    assert process.Process.model_validate(read.model_dump()) == read


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a" * 201, "has 201 characters"),
        ("[ab]", "a set or an escape"),
        ("a\\b", "a set or an escape"),
        ("", ""),
        ("a//b", "is no pattern of paths"),
        ("./a", "is no pattern of paths"),
        ("a/..", "is no pattern of paths"),
        ("a**", "within a name"),
        ("x/**y/z", "within a name"),
    ],
)
def test_pattern_of_another_form_is_refused(value: str, says: str) -> None:
    with pytest.raises(PydanticCustomError) as caught:
        workspace.pattern(value)
    assert says in str((caught.value.context or {})["message"])


@pytest.mark.parametrize("value", ["a" * 200, "**", "a/**/b", "*.x", "a?", ".a", "...", "a.", "**/a"])
def test_pattern_is_returned_as_it_is(value: str) -> None:
    assert workspace.pattern(value) == value


@pytest.mark.parametrize(("size", "accepted"), [(7, False), (8, True), (1024 * 1024, True), (1024 * 1024 + 1, False)])
def test_workspace_holds_8_mib_to_1_tib(size: int, accepted: bool) -> None:
    if accepted:
        assert workspace.Workspace(max_mb=size).max_mb == size
        return
    with pytest.raises(ValueError, match="max_mb"):
        workspace.Workspace(max_mb=size)


def test_workspace_is_a_tree_of_programs() -> None:
    assert workspace.TREE == "workspace"
    table = '[workspace]\nmode = "overlay"\nfrom = ["/home"]\nexec = true\nmax_mb = 32\n'
    text = f'{HEAD}{table}[permissions.executables]\nallow = ["workspace"]\n'
    (tree,) = parse.parse(text.encode()).permissions.executables.allow
    assert (tree.tree, tree.sha256) == (workspace.TREE, None)
