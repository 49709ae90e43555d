"""A manifest must not read as another one: what a person sees in an editor is what is parsed."""

from __future__ import annotations

import pytest

from policy import errors
from policy.manifest import agent
from policy.manifest.parse import parse
from tests import rules_kit as kit

DOCUMENT = kit.MANIFEST + "# an end, in words: été, 日本語, 🙂\n"


def test_control_any_visible_text_is_taken_in_comments() -> None:
    assert parse(DOCUMENT.encode()).agent.id == "hello"
    assert parse(DOCUMENT.replace("\n", "\r\n").encode()).agent.id == "hello"
    assert parse((DOCUMENT + "\t# tab\n").encode()).agent.id == "hello"


@pytest.mark.parametrize(
    "character",
    ["\u2028", "\u2029", "\u0085", "\u202e", "\u2066", "\u200b", "\u200e", "\u00ad", "\u009b", "\U000e0041"],
)
@pytest.mark.parametrize("place", ["comment", "string of an unknown section", "key of an unknown section", "between"])
def test_hidden_characters_are_refused_anywhere(character: str, place: str) -> None:
    # U+2028 in a comment: an editor shows `required = true` as a line of its own, and it is none.
    more = {
        "comment": f"# see the docs{character}required = true\n",
        "string of an unknown section": f'[notes]\ntext = "{character}"\n',
        "key of an unknown section": f'[notes]\n"{character}" = 1\n',
        "between": f"{character}\n",
    }[place]
    with pytest.raises(errors.ManifestSyntaxError) as caught:
        parse((DOCUMENT + more).encode())
    assert caught.value.message == f"the manifest holds the hidden character U+{ord(character):04X}"
    rows = enumerate((DOCUMENT + more).split("\n"), 1)
    line, column = next((n, row.index(character) + 1) for n, row in rows if character in row)
    assert caught.value.where == f"agent.toml:{line}:{column}"


@pytest.mark.parametrize("name", agent.PERMISSION_DOMAINS)
def test_permission_domain_at_top_is_no_section_of_another_process(name: str) -> None:
    for spelt in (name, name.capitalize(), name[:-1]):
        with pytest.raises(errors.ManifestError) as caught:
            parse((kit.MANIFEST + f'[{spelt}]\ndeny = ["socket"]\n').encode())
        assert f"unknown section `{spelt}`" in caught.value.message
        assert f"did you mean `[permissions.{name}]`" in caught.value.hint
    assert parse((kit.MANIFEST + "[telemetry]\nx = 1\n").encode()).unknown_sections == ("telemetry",)
