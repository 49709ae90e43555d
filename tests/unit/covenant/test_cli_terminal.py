"""Tables that fit, colour where it is wanted; completion; and examples that parse."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.cli import main, terminal
from covenant.cli.daemon import client
from policy import errors
from tests.cli_kit import call, refused

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


class Terminal(io.StringIO):
    def __init__(self, tty: bool = True) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@given(rows=st.lists(st.lists(WORDS, min_size=3, max_size=3), max_size=5), width=st.integers(22, 120))
def test_table_fits_whatever_is_in_it(rows: list[list[str]], width: int) -> None:
    lines = terminal.table(("ONE", "TWO", "THREE"), rows, width=width)
    assert len(lines) == len(rows) + 1
    for line in lines:
        assert terminal.cells(line) <= width
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", line)


@given(rows=st.lists(st.lists(WORDS, min_size=2, max_size=2), max_size=5))
def test_without_width_nothing_is_cut(rows: list[list[str]]) -> None:
    assert "…" in "".join(map("".join, rows)) or "…" not in "".join(terminal.table(("A", "B"), rows, width=None))


def test_widest_gives_way() -> None:
    rows = [["short", "x" * 50, "y" * 12]]
    head, line = terminal.table(("A", "B", "C"), rows, width=40)
    assert line == "short  " + "x" * 18 + "…  " + "y" * 12
    assert head.split() == ["A", "B", "C"]
    # all of them at the least: no endless narrowing where the terminal is smaller than that
    assert terminal.table(("A", "B"), [["x" * 50, "y" * 50]], width=3)[1] == "xxxxx…  yyyyy…"


@pytest.mark.parametrize(
    ("text", "width", "wanted"),
    [
        ("漢字" * 8, 13, "漢字漢字漢字…"),
        ("漢字" * 8, 12, "漢字漢字漢 …"),
        ("漢字漢字", 8, "漢字漢字"),
        ("e\u0301" * 8, 8, "e\u0301" * 8),
        ("[bold]x[/bold]", 20, "[bold]x[/bold]"),
        ("[bold]x[/bold] :smile:", 10, "[bold]x[/…"),
        ("x\x1b[31m\u202e", 40, "x\\x1b[31m\\u202e"),
    ],
)
def test_cell_is_cut_at_columns_of_terminal(text: str, width: int, wanted: str) -> None:
    (_, line) = terminal.table(("A",), [[text]], width=width)
    assert line == wanted
    assert terminal.cells(wanted) <= width


@pytest.mark.parametrize(
    ("text", "columns"),
    [("会議", 4), ("한글", 4), ("\u1112\u1161\u11ab\u1100\u1173\u11af", 4), ("ที่นี่", 2), ("हिन्दी", 5), ("اجتماع", 6)],
)
def test_columns_after_marks_stay_in_line(text: str, columns: int) -> None:
    _, line, other = terminal.table(("A", "B"), [[text, "x"], ["y" * 12, "x"]], width=None)
    assert terminal.cells(text) == columns
    assert line == text + " " * (12 - columns) + "  x"
    assert other == "y" * 12 + "  x"


@pytest.mark.parametrize(
    ("text", "most", "wanted"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("ae\u0301\u0302bc", 4, "a…"),
        ("a👩\u200d👩\u200d👧bc", 5, "a…"),
        ("a👩🏽bc", 3, "a…"),
        ("é" * 40 + "\u0301" * 30, 60, "é" * 39 + "…"),
        # More than an ellipsis remains of what is no text.
        ("e" + "\u0301" * 9, 9, "e\\u0301\\…"),
        ("\u200d" * 100, 13, "\\u200d\\u200d…"),
        ("a" * 20 + "\u0301" * 100, 60, "a" * 20 + "\\u0301" * 6 + "\\u0…"),
        ("aa", 1, "…"),
        ("\u0301" * 2, 1, "…"),
    ],
)
def test_clipped_text_loses_no_mark(text: str, most: int, wanted: str) -> None:
    assert terminal.clipped(text, most) == wanted


def test_columns_at_right_are_same_in_both_tables() -> None:
    rows = [["a", 5, "x" * 30], ["bbb", 12345, "y"]]
    assert terminal.table(("A", "N", "C"), rows, width=None, right={"N"})[2] == "bbb  12345  y"
    assert terminal.table(("A", "N", "C"), rows, width=None, right={"N"})[1] == "a        5  " + "x" * 30
    assert terminal.table(("A", "N", "C"), rows, width=30, right={"N"})[1] == "a        5  " + "x" * 17 + "…"


@pytest.mark.parametrize(
    ("tty", "variables", "wanted"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colour_only_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tty: bool, variables: dict[str, str], wanted: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal(tty))
    assert ("\x1b[" in terminal.styled("x", fg="red")) is wanted


@pytest.mark.parametrize(("before", "older"), [(None, None), (1, 2)])
def test_one_cut_off(before: int | None, older: int | None) -> None:
    with pytest.raises(errors.UsageError):
        client.moment(before, older)


def test_cut_off_of_before_clock_began() -> None:
    assert client.moment(None, 2**63) == 0
    assert client.moment(5, None) == 5


def complete(*words: str, shell: str = "bash") -> subprocess.CompletedProcess[str]:
    variables = {
        "_COVENANT_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    program = """
import sys
sys.argv[0] = "covenant"
from covenant.cli.main import entry
try:
    entry()
finally:
    heavy = {"pydantic", "cryptography", "aiohttp", "anyio", "numpy"} & set(sys.modules)
    print("heavy", sorted(heavy), file=sys.stderr)
"""
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)


def test_completion_of_verbs_imports_nothing_heavy() -> None:
    done = complete("covenant", "me")
    assert sorted(done.stdout.split()) == ["plain,memory", "plain,metrics"]
    assert "heavy []" in done.stderr


def test_what_asks_daemon_is_light() -> None:
    """No verb of the daemon loads an event loop or models before it asks."""
    verbs = ("a2a", "agents", "basics", "capabilities", "intents", "memory", "peers", "settlement")
    modules = ", ".join(
        [
            "covenant.wire.client",
            "covenant.cli.audit.stream",
            *(f"covenant.cli.daemon.{name}" for name in verbs),
        ]
    )
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "covenant.cli.daemon.a2a_messages" in loaded, done.stderr
    heavy = {"anyio", "asyncio", "pydantic", "cryptography", "aiohttp", "numpy", "subprocess", "tempfile", "tomllib"}
    assert sorted(loaded & heavy) == []


def test_completion_below_group() -> None:
    assert complete("covenant", "a2a", "re").stdout.split() == [
        "plain,recv",
        "plain,requeue",
        "plain,result",
        "plain,retry-stale",
    ]
    assert "plain,--agent" in complete("covenant", "intent", "--").stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_shell(shell: str) -> None:
    done = call("completion", shell)
    assert done.exit_code == 0
    assert "_COVENANT_COMPLETE" in done.stdout
    # fish showed `Read` for `Read, search and write memory, and keep it in order.`
    assert ('string split --max 1 ","' in done.stdout) is (shell == "fish")
    assert 'string split ","' not in done.stdout


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command, info_name=name)
    for each in command.list_commands(context):
        found = command.get_command(context, each)
        assert found is not None
        yield from leaves(found, f"{name} {each}")


def commands() -> list[tuple[str, click.Command]]:
    context = click.Context(main.cli, info_name="covenant")
    found = list[tuple[str, click.Command]]()
    for name in main.COMMANDS:
        group = main.cli.get_command(context, name)
        assert group is not None
        found += [one for one in leaves(group, name) if not one[1].hidden]
    return found


@pytest.mark.parametrize(("name", "command"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_verb_shows_examples_that_parse(name: str, command: click.Command) -> None:
    assert command.epilog is not None
    shown = [line.strip() for line in command.epilog.splitlines() if line.startswith("  ")]
    assert shown
    checked = 0
    for line in shown:
        words = shlex.split(re.split(" [<>|] ", line)[0])
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words[: 1 + len(name.split())] == ["covenant", *name.split()]:
            rest = words[1 + len(name.split()) :]
            command.make_context(name, rest, resilient_parsing=False)
            checked += 1
    assert checked
    # and the page of the verb shows them on lines of their own
    page = command.get_help(click.Context(command, info_name=name, terminal_width=500, max_content_width=500))
    assert all(line in page for line in shown)


def test_signers_of_chain_are_refused_whatever_they_are_given() -> None:
    from covenant.cli.daemon import settlement

    assert len(settlement.SIGNERS) == 13
    for name in settlement.SIGNERS:
        for more in ([], ["--keypair", "k.json", "--cluster", "devnet", "--json"], ["--help"]):
            refused("unsupported", "chain", name, *more)
