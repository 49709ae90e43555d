"""The words of a session: what a manifest can hold, and what is refused with its place and a fix."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covenant.cli import common
from covenant.session import typed
from covenant.session.typed import Destination, SecretWord
from policy import errors


@pytest.mark.parametrize(
    ("word", "place", "cause"),
    [
        ("a\0b", "argument 2 of the command", "U+0000"),
        ("\x1b[31m", "argument 2 of the command", "U+001B"),
        ("\u202ecod", "argument 2 of the command", "U+202E"),
        ("\udcff", "argument 2 of the command", "not UTF-8"),
        ("x" * 16_385, "argument 2 of the command", "16385 characters"),
        ("say {intent}", "argument 2 of the command", "{intent}"),
    ],
)
def test_argument_that_is_refused(word: str, place: str, cause: str) -> None:
    with pytest.raises(errors.UsageError) as e:
        typed.command(["sh", "-c", word])
    assert e.value.message.startswith(place)
    assert cause in e.value.message
    assert e.value.hint
    with pytest.raises(errors.UsageError, match=r"^the command"):
        typed.command([word])


@pytest.mark.parametrize(
    ("written", "found"),
    [("local", ("local", "*")), ("local:test-1", ("local", "test-1")), ("a:claude-*", ("a", "claude-*"))],
)
def test_model_is_split(written: str, found: tuple[str, str]) -> None:
    one = typed.model(written)
    assert (one.provider, one.pattern) == found


@pytest.mark.parametrize("written", ["", ":x", "local:", "Local", "local:a*b", "local:a b", "local:x:**"])
def test_model_that_is_none_is_refused(written: str) -> None:
    with pytest.raises(errors.UsageError, match="names no model"):
        typed.model(written)


@pytest.mark.parametrize("words", [(), ("",), (" ",)])
def test_command_that_is_missing(words: tuple[str, ...]) -> None:
    with pytest.raises(errors.UsageError, match="no command"):
        typed.command(words)


def test_arguments_that_are_accepted() -> None:
    typed.command(["sh", "-c", "two\nlines\tand a tab", "", "é 漢 🙂", "x" * 16_384])


@pytest.mark.parametrize(
    ("written", "host", "port"),
    [
        ("example.com", "example.com", 443),
        ("example.com:80", "example.com", 80),
        ("10.0.0.1:8080", "10.0.0.1", 8080),
        ("fd00::1", "fd00::1", 443),
        ("[fd00::1]", "fd00::1", 443),
        ("[fd00::1]:80", "fd00::1", 80),
    ],
)
def test_destination_is_split(written: str, host: str, port: int) -> None:
    assert typed.destination(written) == Destination(host, port)


@pytest.mark.parametrize("written", ["a.example:", "a.example:http", "a.example:0", "a.example:65536", "a.example:²"])
def test_destination_without_port(written: str) -> None:
    with pytest.raises(errors.UsageError, match="no port from 1 to 65535") as e:
        typed.destination(written)
    assert e.value.hint == "write --net HOST or --net HOST:PORT"


@pytest.mark.parametrize(
    "written", ["NAME", "=x", "1A=x", "A B=x", "LD_PRELOAD=x", "CREDENTIALS_DIRECTORY=/", "A=\x1b"]
)
def test_variable_that_is_refused(written: str) -> None:
    with pytest.raises(errors.UsageError, match="--env") as e:
        typed.variable(written)
    assert e.value.hint


@pytest.mark.parametrize("written", ["", "=T", "mail=", "mail=1T", "mail=A B", "mail=LD_AUDIT", "ma/il", "mail=A=B"])
def test_secret_that_is_refused(written: str) -> None:
    with pytest.raises(errors.UsageError, match="--secret") as e:
        typed.secret(written)
    assert e.value.hint


def test_secret_is_split() -> None:
    assert typed.secret("api-key") == SecretWord("api-key")
    assert typed.secret("api-key=API_KEY") == SecretWord("api-key", "API_KEY")


@pytest.mark.parametrize(
    ("env", "secrets", "cause"),
    [
        ([("MAIL", "x")], [SecretWord("MAIL")], "--env MAIL has the name of the secret `MAIL`"),
        ([("TOKEN", "x")], [SecretWord("mail", "TOKEN")], "--env TOKEN has the name of the secret `mail`"),
        ([("A", "x"), ("A", "y")], [], "A is given twice"),
        ([], [SecretWord("a", "T"), SecretWord("b", "T")], "T is given twice"),
    ],
)
def test_variables_that_meet(env: list[tuple[str, str]], secrets: list[SecretWord], cause: str) -> None:
    with pytest.raises(errors.UsageError) as e:
        typed.check_variables(env, secrets)
    assert cause in e.value.message
    assert e.value.hint
    typed.check_variables(env[:1], [])
    typed.check_variables([], secrets[:1])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text())
def test_words_are_accepted_or_refused(word: str) -> None:
    for read in (typed.destination, typed.secret, typed.variable, lambda one: typed.command([one])):
        with contextlib.suppress(errors.UsageError):
            read(word)
            continue
        with pytest.raises(errors.UsageError) as e:
            read(word)
        assert e.value.hint
        assert common.visible(e.value.message) == e.value.message


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("https://example.org/a:1?b", "write --net example.org"),
        ("https://example.org:8443", "write --net example.org:8443"),
        ("http://example.org/", "write --net example.org:80"),
        ("https://", "write --net HOST"),
    ],
)
def test_url_is_answered_with_its_host(written: str, fix: str) -> None:
    with pytest.raises(errors.UsageError, match=r"is a URL$") as e:
        typed.destination(written)
    assert e.value.hint == fix
    if "HOST" not in fix:
        typed.destination(fix.removeprefix("write --net "))
