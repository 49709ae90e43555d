"""Entries [[mcp.server]]: what is read, what is left out with a warning, and the names of tools."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from covenant.providers import mcp_servers
from covenant.providers.mcp_servers import McpServer

HOME = Path("/home/of")
GOOD = '[[mcp.server]]\nname = "files"\npackage = "mine"\n'


def read(text: str) -> tuple[tuple[McpServer, ...], tuple[str, ...]]:
    return mcp_servers.entries(tomllib.loads(text), HOME)


def test_entry_with_every_key() -> None:
    more = 'enabled = true\ntool_prefix = "fs"\ninclude = ["read*", "stat"]\nexclude = ["read_all"]\n'
    found, warnings = read(GOOD + more)
    assert warnings == ()
    assert found == (McpServer("files", HOME / "agents" / "mine", "fs", ("read*", "stat"), ("read_all",)),)


def test_package_may_be_a_path() -> None:
    ((found,), _) = read(GOOD.replace('"mine"', '"/srv/tools"'))
    assert found.package == Path("/srv/tools")


@pytest.mark.parametrize("text", ["", "[mcp]\n", "[llm]\nprovider = 'x'\n", GOOD + "enabled = false\n"])
def test_no_entry_has_no_warning(text: str) -> None:
    assert read(text) == ((), ())


UNUSABLE = {
    'command = "npx"': "docs/tool-calls.md",
    "args = []": "docs/tool-calls.md",
    'env = { TOKEN = "secret-word" }': "docs/tool-calls.md",
    'exclud = ["secret-word"]': "none of enabled, exclude",
    'enabled = "secret-word"': "true or false",
    "tool_prefix = 7": "tool_prefix",
    f'tool_prefix = "{"x" * 65}"': "tool_prefix",
    'include = "secret-word"': "include",
    'include = ["*secret-word"]': "include",
    "exclude = [1]": "exclude",
}


@pytest.mark.parametrize(("line", "said"), UNUSABLE.items())
def test_unusable_entry_is_left_out_with_its_fix(line: str, said: str) -> None:
    other = GOOD.replace("files", "other")
    found, (warning,) = read(f"{GOOD}{line}\n{other}")
    assert [one.name for one in found] == ["other"]
    assert warning.startswith("[[mcp.server]] `files` was left out: ")
    assert said in warning
    assert "secret-word" not in warning
    # Without the line the entry is taken: the fix of each of them.
    assert len(read(f"{GOOD}{other}")[0]) == 2


@pytest.mark.parametrize("package", ["", ".", "..", "../x", "a/b", "a\\u0000", "/a\\u0000", ".hidden"])
def test_package_of_another_place_is_left_out(package: str) -> None:
    found, (warning,) = read(GOOD.replace("mine", package))
    assert (found, "`package`" in warning) == ((), True)


@pytest.mark.parametrize("name", ["", "a b", "secret-word\\n", "x" * 65])
def test_entry_without_usable_name_is_named_by_its_number(name: str) -> None:
    found, (warning,) = read(GOOD.replace("files", name))
    assert (found, warning.startswith("[[mcp.server]] number 1 ")) == ((), True)


def test_second_entry_of_a_name_and_of_too_many() -> None:
    found, (warning,) = read(GOOD + GOOD.replace("mine", "other"))
    assert [one.package.name for one in found] == ["mine"]
    assert "an earlier entry" in warning
    many = "".join(GOOD.replace("files", f"n{number}") for number in range(mcp_servers.MOST + 1))
    found, (warning,) = read(many)
    assert (len(found), f"{mcp_servers.MOST} servers" in warning) == (mcp_servers.MOST, True)


@pytest.mark.parametrize("text", ["mcp = 1\n", "[mcp]\nserver = 1\n", "[mcp]\nserver = {}\n"])
def test_section_of_another_form_is_left_out(text: str) -> None:
    found, warnings = read(text)
    assert (found, len(warnings)) == ((), 1)


def test_entry_that_is_no_table() -> None:
    assert len(read("[mcp]\nserver = [1]\n")[1]) == 1


@pytest.mark.parametrize(
    ("include", "exclude", "tool", "listed"),
    [
        ((), (), "read", True),
        (("*",), (), "read", True),
        (("read",), (), "read", True),
        (("read",), (), "reads", False),
        (("re*",), (), "reads", True),
        (("re*",), (), "write", False),
        ((), ("re*",), "reads", False),
        (("*",), ("*",), "read", False),
        (("r*",), ("read",), "reads", True),
        (("",), (), "read", False),
    ],
)
def test_tools_are_included_and_excluded(
    include: tuple[str, ...], exclude: tuple[str, ...], tool: str, listed: bool
) -> None:
    server = McpServer("a", HOME, "", include, exclude)
    assert server.listed_as(tool) == (tool if listed else None)


@pytest.mark.parametrize(
    ("prefix", "name"), [("", "read"), ("fs", "mcp_fs_read"), ("a.b-c d", "mcp_a_b_c_d_read"), ("ü", "mcp___read")]
)
def test_prefix_is_sanitised(prefix: str, name: str) -> None:
    assert McpServer("a", HOME, prefix).listed_as("read") == name


def test_entry_of_the_page_is_usable() -> None:
    page = (Path(__file__).parents[4] / "docs" / "tool-calls.md").read_text()
    entry = page[page.index("[[mcp.server]]") :].partition("```")[0]
    ((found,), warnings) = read(entry)
    assert (found.listed_as("read_text_file"), found.listed_as("write_file")) == ("mcp_fs_read_text_file", None)
    assert warnings == ()
