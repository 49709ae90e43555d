"""`ask` of `[permissions.skills]`: what may be written, and what it means to a role, a parent, a child and a reader."""

from __future__ import annotations

import pytest

from policy import data, errors
from policy.explain import diff
from policy.grants.effective import Effective
from policy.manifest import parse
from policy.rules import nine
from tests import signing_kit

SEND, READ = "matrix://tool/mcp/mail/send@1.2.0", "matrix://tool/mcp/mail/read@1.2.0"


def effective(more: str = "") -> Effective:
    table = f'\n[permissions.skills]\nallow = ["{SEND}", "{READ}"]\nside_effects = ["network"]\n'
    return nine.requested(parse.parse(signing_kit.MANIFEST + (table + more).encode()), roles=data.roles())


ASKED, PLAIN = effective(f'ask = ["{SEND}"]\n'), effective()


def test_question_is_narrower_than_the_grant() -> None:
    assert ASKED.skills.is_subset(PLAIN.skills)
    assert not PLAIN.skills.is_subset(ASKED.skills)
    assert PLAIN.skills.meet(ASKED.skills) == ASKED.skills
    assert ASKED.skills.difference(PLAIN.skills).allow.names == frozenset()
    assert PLAIN.skills.difference(ASKED.skills).allow.names == {SEND}


def test_question_is_shown_by_explain_and_diff() -> None:
    assert f"skill {SEND} once an operator grants it" in ASKED.skills.describe()
    assert f"skill {READ}" in ASKED.skills.describe()
    assert f"skill {SEND}" in str(diff.compare(ASKED, PLAIN))


@pytest.mark.parametrize(
    ("more", "said", "fix"),
    [
        (f'[permissions.skills]\nask = ["{SEND}"]\n', "not granted", f'[permissions.skills]\nallow = ["{SEND}"]\n'),
        ("[permissions.skills]\nask_seconds = 5\n", "without a question", "[permissions.skills]\n"),
        (
            f'[permissions.skills]\nallow = ["{SEND}"]\nask = ["{SEND}", "{SEND}"]\n',
            "twice",
            f'[permissions.skills]\nallow = ["{SEND}"]\nask = ["{SEND}"]\nask_seconds = 110\n',
        ),
        (
            f'[permissions.skills]\nallow = ["{SEND}"]\nask = ["{SEND}"]\nask_seconds = 111\n',
            "out of range",
            f'[permissions.skills]\nallow = ["{SEND}"]\nask = ["{SEND}"]\nask_seconds = 110\n',
        ),
        ('[permissions.filesystem]\nread = ["/srv"]\non_deny = "ask"\n', "gVisor answers an open file call by itself",
         '[permissions.filesystem]\nread = ["/srv"]\n'),
    ],
)  # fmt: skip
def test_entry_that_cannot_be_asked_is_refused(more: str, said: str, fix: str) -> None:
    with pytest.raises(errors.ManifestError, match=said):
        parse.parse(signing_kit.MANIFEST + b"\n" + more.encode())
    parse.parse(signing_kit.MANIFEST + b"\n" + fix.encode())
