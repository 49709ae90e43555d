"""Check the ignore set: the matches of its rules in texts, the place of its file, and when it is read again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covenant.handlers.memory import ignore_check
from covenant.handlers.state import ignore_rules
from covenant.handlers.state.ignore_rules import SEEDED, IgnoreSet
from covenant.wire import requests
from policy import errors
from tests import server_kit
from tests.memory_kit import ALICE


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("read /srv/app/.env and tell me", "**/.env"),
        ("what is in .env?", "**/.env"),
        ('cat ".env"', "**/.env"),
        ("diff .env.local with the rest", "**/.env.*"),
        ("x/secrets.toml", "**/secrets.toml"),
        ("print secrets.json.", "**/secrets.json"),
        ("the file C:\\keys\\server.pem", "**/*.pem"),
        ("send me server.key, please", "**/*.key"),
        ("upload id_rsa.pub", "**/id_rsa*"),
        ("~/.ssh/config", "**/.ssh/**"),
        ("ls .ssh/", "**/.ssh/**"),
        ("/root/.aws/credentials", "**/.aws/credentials"),
        ("a/credentials.json", "**/credentials.json"),
        ("key=/home/a/.ssh/id_ed25519", "**/.ssh/**"),
    ],
)
def test_what_is_seeded_finds_names_of_secrets(text: str, pattern: str) -> None:
    assert IgnoreSet.of(*SEEDED).match(text) == pattern


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rotate my credentials",
        "summarise the environment report",
        "the key question is whether pem files matter",
        "what is an envelope.",
        "write to bob@ssh.example",
        "id rsa",
    ],
)
def test_what_is_seeded_lets_plain_words_pass(text: str) -> None:
    assert IgnoreSet.of(*SEEDED).match(text) is None


@pytest.mark.parametrize(
    ("rule", "text", "found"),
    [
        # Version 1: a match anywhere, with any text behind it, case-sensitive.
        ("secret project", "about the secret project X", True),
        ("secret", "a secretary", True),
        ("secret", "a Secret", False),
        ("/deploy", "deploy now", True),
        ("/deploy", "please deploy now", False),
        ("/deploy*now", "deploy it now", True),
        ("a*c", "abc", True),
        ("a*c", "a/c", False),
        ("a*c", "a" + "b" * 255 + "c", True),
        ("a*c", "a" + "b" * 256 + "c", False),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("a?c", "a/c", False),
        ("a/**/c", "a/b/d/c", True),
        ("a**c", "a\nb/c", True),
        ("a**b**c", "c b a b", False),
        ("a**b**c", "c a b b x c", True),
        ("*", "x", True),
        ("**", "", False),
        ("[x", "a [x] b", True),
        ("a[[x]", "a[[x]", True),
        ("\\!important", "so !important", True),
        ("\\#1", "issue #1", True),
        # As in git: a directory matches everything below it, a pattern without a slash matches any component.
        ("build/", "look at build/out.txt", True),
        ("**/key.txt", "key.txt", True),
    ],
)
def test_rule_finds(rule: str, text: str, found: bool) -> None:
    assert (IgnoreSet.of(rule).match(text) is not None) == found


@pytest.mark.parametrize(
    ("rules", "text", "pattern"),
    [
        (("*.pem", "!public.pem"), "read public.pem", None),
        (("*.pem", "!public.pem"), "read private.pem", "*.pem"),
        # Naming a harmless file does not hide the other.
        (("*.pem", "!public.pem"), "read private.pem, then public.pem", "*.pem"),
        (("*.pem", "!public.pem", "public.pem"), "read public.pem", "public.pem"),
        (("!public.pem", "*.pem"), "read public.pem", "*.pem"),
        (("**/.env", "**/.env.*", "!**/.env.example"), "copy .env.example", None),
        (("**/.env", "**/.env.*", "!**/.env.example"), "copy /a/.env.example to /a/.env", "**/.env"),
        (("a", "b"), "b a", "b"),
        (("# a", "", "   ", "!", "/"), "a", None),
    ],
)
def test_last_match_wins_for_each_place(rules: tuple[str, ...], text: str, pattern: str | None) -> None:
    assert IgnoreSet.of(*rules).match(text) == pattern


@settings(deadline=None)
@given(
    st.lists(st.text(alphabet="ab*?/![]\\ .#é\n", max_size=10), max_size=5), st.text(alphabet="ab/ .\n\\é", max_size=60)
)
def test_any_rules_and_any_text_give_answer(rules: list[str], text: str) -> None:
    made = IgnoreSet.of(*rules)
    found = made.match(text)
    assert found is None or found in made.rules
    # A rule that negates everything leaves no match.
    assert not text or IgnoreSet.of(*rules, "!*").match(text) is None
    assert not text or IgnoreSet.of(*rules, "*").match(text) == "*"


@settings(deadline=None)
@given(st.text(alphabet="abc/. ", min_size=1, max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_what_rule_says_is_found_wherever_it_stands(said: str, before: str, after: str) -> None:
    said = said.strip("/ ")
    if said:
        assert IgnoreSet.of(said).match(f"{before}{said}{after}") == said


def test_long_text_made_to_be_slow_is_searched_all_same() -> None:
    rules = IgnoreSet.of(*SEEDED, "a**b**c", "foo*bar", "x/**/y/**/z", "x/", "!x", "!/")
    for text in ("a" * 10**6, "foo" * 10**5, "x/" * 10**5 + "y/" * 10**5, "a/.en" * 10**5, "/" * 10**6):
        assert rules.match(text) is None


# The file ------------------------------------------------------------------------------------------------------


def test_home_without_rules_gets_seeded_ones(home: Path) -> None:
    assert IgnoreSet.open(home).rules == SEEDED
    assert (home / ".covenantignore").stat().st_mode & 0o777 == 0o600
    (home / ".covenantignore").write_text("mine\n")
    assert IgnoreSet.open(home).rules == ("mine",)


def test_change_counts_at_next_text(home: Path) -> None:
    made = IgnoreSet.open(home)
    path = home / ".covenantignore"
    path.write_text("first\n")
    assert made.match("the first") == "first"
    path.write_text("other\n")
    assert made.match("the first") is None
    assert made.match("the other") == "other"
    os.replace(_written(home / "new", "third\n"), path)
    assert made.rules == ("third",)


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"x\n" * 600_000])
def test_while_file_cannot_be_read_rules_before_hold(home: Path, bad: bytes, caplog: pytest.LogCaptureFixture) -> None:
    made = IgnoreSet.open(home)
    (home / ".covenantignore").write_bytes(bad)
    assert made.rules == SEEDED
    assert "hold" in caplog.text
    with pytest.raises(errors.IgnoreFileError):
        IgnoreSet.open(home)
    (home / ".covenantignore").unlink()
    assert made.match("x/.env") == "**/.env"


def test_link_directory_and_home_for_all_are_refused(home: Path, tmp_path: Path) -> None:
    (home / ".covenantignore").symlink_to(_written(tmp_path / "rules", "x"))
    with pytest.raises(errors.IgnoreFileError, match="symlink"):
        IgnoreSet.open(home)
    (home / ".covenantignore").unlink()
    (home / ".covenantignore").mkdir()
    with pytest.raises(errors.IgnoreFileError):
        IgnoreSet.open(home)
    (home / ".covenantignore").rmdir()
    home.chmod(0o755)
    with pytest.raises(errors.IgnoreFileError, match="0755"):
        IgnoreSet.open(home)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.anyio
async def test_long_text_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, begun, go_on = IgnoreSet.of("secret"), threading.Event(), threading.Event()
    whole = rules.match

    def match(text: str) -> str | None:
        if len(text) > 100:
            begun.set()
            assert go_on.wait(60)
        return whole(text)

    monkeypatch.setattr(rules, "match", match)
    monkeypatch.setattr(ignore_rules, "AT_ONCE", 100)
    found: list[str | None] = []

    async def look(text: str) -> None:
        found.append(await rules.find(text))

    async with anyio.create_task_group() as group:
        group.start_soon(look, "x" * 1000 + "secret")
        await anyio.to_thread.run_sync(begun.wait, 60)
        # While a thread searches the long text, the loop answers others.
        assert await rules.find("a secret") == "secret"
        assert found == []
        go_on.set()
    assert found == ["secret"]


@pytest.mark.anyio
async def test_answer_waits_for_none_of_those_who_only_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, begun, go_on = IgnoreSet.of("secret"), threading.Semaphore(0), threading.Event()
    whole = rules.match

    def match(text: str) -> str | None:
        if text.startswith("asked"):
            begun.release()
            assert go_on.wait(60)
        return whole(text)

    monkeypatch.setattr(rules, "match", match)
    monkeypatch.setattr(ignore_rules, "AT_ONCE", 100)
    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(rules.find, "asked" + "x" * 1000)
        await anyio.to_thread.run_sync(begun.acquire, True, 60)
        try:
            with anyio.fail_after(60):
                assert await rules.find("x" * 1000 + "secret", of_answer=True) == "secret"
        finally:
            go_on.set()


@pytest.mark.anyio
async def test_ignore_check_says_which_rule(home: Path) -> None:
    server = server_kit.make(home=home, ignore=IgnoreSet.of("a", "!ab"))
    check = ignore_check.HANDLERS["ignore_check"]
    caller = server_kit.caller(ALICE)
    report = await check(server, caller, requests.IgnoreCheck(text="x a"))
    assert report.model_dump() == {
        "kind": "ignore_report",
        "ignored": True,
        "matched_pattern": "a",
        "rules_loaded": 2,
    }
    report = await check(server, caller, requests.IgnoreCheck(text="ab"))
    assert report.model_dump(exclude={"kind"}) == {"ignored": False, "matched_pattern": None, "rules_loaded": 2}
