"""Check that any string of a manifest reaches Kubernetes as a legal name or as an unchanged literal."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from policy.compile.targets.kubernetes_names import label, literal

# RFC 1035 labels are RFC 1123 labels that begin with a letter: legal for every kind of object.
LEGAL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
texts = st.text(max_size=200) | st.text(alphabet="aZ9-._ é$/\n", max_size=80)


@given(texts)
@example("")
@example("-" * 100)
@example("9" * 100)
@example("a" * 45 + "-" + "b" * 45)
@example("\udcff")
def test_every_string_has_legal_label(text: str) -> None:
    assert LEGAL.fullmatch(label(text))


@given(texts, texts)
def test_two_strings_have_two_labels(a: str, b: str) -> None:
    assert (label(a) == label(b)) == (a == b)
    assert (label("x", a) == label("x", b)) == (a == b)


def expanded(text: str, environment: dict[str, str]) -> str:
    """Expand a word of `command` as the kubelet does: `$$` becomes `$`, `$(NAME)` the variable's value if it is set."""
    out, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            out, at = out + "$", at + 2
        elif (found := re.compile(r"\$\(([^)]*)\)").match(text, at)) and found[1] in environment:
            out, at = out + environment[found[1]], found.end()
        else:
            out, at = out + text[at], at + 1
    return out


@given(st.text(alphabet="$()HOMEa ", max_size=24))
@example("$(HOME)")
@example("$$(HOME)")
@example("$$$(HOME)")
def test_literal_is_never_expanded(text: str) -> None:
    assert expanded(literal(text), {"HOME": "/root"}) == text


def test_reader_does_expand() -> None:
    assert expanded("$(HOME) $$(HOME) $(NONE)", {"HOME": "/root"}) == "/root $(HOME) $(NONE)"
