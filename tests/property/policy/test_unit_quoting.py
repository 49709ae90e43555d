"""Check that any string is quoted in a unit file as one word that systemd's rules read back unchanged.

The reader follows systemd.syntax(7) and systemd.service(5). tests/packaging/test_unit_of_systemd.py gives the same
strings to systemd itself.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policy import errors
from policy.compile.targets import unit_quoting

# Characters that are special somewhere in a unit file, among others that are not.
texts = st.text(alphabet=" \"'\\%$;:#=@!+-|~*[]{}/a0éıxn\u00a0\u2028", max_size=30) | st.text(max_size=60)


def read(line: str, *, unescape: bool, separators: str = " \t") -> list[str]:
    """Split a value into words. With `unescape` a backslash begins a C escape, else it keeps the next character."""
    words: list[str] = []
    word, quote, inside, at = "", "", False, 0
    while at < len(line):
        ch = line[at]
        if ch == "\\":
            at += 1
            assert at < len(line), "a backslash at the end joins the next line"
            assert not unescape or line[at] in "\\\"' ", "another escape means another character"
            word, inside = word + line[at], True
        elif quote:
            quote, word = ("", word) if ch == quote else (quote, word + ch)
        elif ch in "\"'":
            quote, inside = ch, True
        elif ch in separators:
            words, word, inside = ([*words, word] if inside else words), "", False
        else:
            word, inside = word + ch, True
        at += 1
    assert not quote
    return [*words, word] if inside else words


def specifiers(word: str) -> str:
    """Expand `%%` to a per cent sign; systemd would replace any other specifier."""
    out, at = "", 0
    while at < len(word):
        if word[at] == "%":
            assert word[at + 1] == "%"
            at += 1
        out, at = out + word[at], at + 1
    return out


def legal(text: str) -> bool:
    try:
        unit_quoting.word(text)
    except errors.NotEnforceableError:
        return False
    return True


@given(st.lists(texts, max_size=4), st.booleans())
@example(["a\\", "b"], True)
@example(["", ";", "#"], False)
def test_words_are_read_back(values: list[str], unescape: bool) -> None:
    kept = [value for value in values if legal(value)]
    line = unit_quoting.words(kept)
    assert [specifiers(word) for word in read(line, unescape=unescape)] == kept
    assert "\n" not in line
    assert not line.endswith("\\")


@given(texts, texts)
def test_bind_is_two_paths(source: str, destination: str) -> None:
    paths = ["/" + source, "/" + destination]
    if all(map(legal, paths)):
        words = read(unit_quoting.bind(*paths), unescape=False, separators=": \t")
        assert [specifiers(word) for word in words] == [*paths, "norbind"]


@given(texts)
def test_program_begins_with_sign_against_variables(text: str) -> None:
    if legal(text) and not set(text) & set("\"'\\"):
        (word,) = read(unit_quoting.program("/" + text), unescape=True)
        assert specifiers(word) == ":/" + text
    else:
        with pytest.raises(errors.NotEnforceableError):
            unit_quoting.program("/" + text)


@given(texts)
def test_what_ends_line_or_hides_in_it_is_refused(text: str) -> None:
    for bad in ("\n", "\r", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\udcff"):
        with pytest.raises(errors.NotEnforceableError):
            unit_quoting.word(text + bad)


@given(texts)
def test_path_begins_with_slash_so_that_no_prefix_is_taken_from_it(text: str) -> None:
    for door in (unit_quoting.path, unit_quoting.rooted, unit_quoting.program):
        if not text.startswith("/"):
            with pytest.raises(errors.NotEnforceableError):
                door(text)
    if text.startswith("/") and legal(text):
        assert [specifiers(w) for w in read(unit_quoting.rooted(text), unescape=False)] == [f"+{text}"]


@given(texts)
@example("a.b-c_D9")
@example("a" * 129)
@example("é")
def test_bare_name_holds_nothing_that_means_anything(text: str) -> None:
    plain = (
        0 < len(text) <= 128
        and text[0].isalnum()
        and text.isascii()
        and not set(text) - set("_.-") - {ch for ch in text if ch.isalnum()}
    )
    if plain:
        assert unit_quoting.bare(text) == text
    else:
        with pytest.raises(errors.NotEnforceableError):
            unit_quoting.bare(text)


def test_reader_does_split_expand_and_refuse() -> None:
    assert read('a "b c" d\\ e', unescape=False) == ["a", "b c", "d e"]
    assert read('"/a":"/b"', unescape=False, separators=":") == ["/a", "/b"]
    with pytest.raises(AssertionError):
        read('"a\\', unescape=False)
    with pytest.raises(AssertionError):
        read('"a\\n"', unescape=True)
    with pytest.raises(AssertionError):
        specifiers("%i")
