"""Check the keys that detach: how an option names them, and what of the typed bytes is passed on."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covenant.cli.run import detach_keys
from covenant.cli.run.detach_keys import DetachKeys
from policy import errors

_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("written", "keys", "shown"),
    [("ctrl-p,ctrl-q", b"\x10\x11", "Ctrl-P Ctrl-Q"), ("ctrl-a,d", b"\x01d", "Ctrl-A d"), ("none", b"", "")],
)
def test_keys_are_named(written: str, keys: bytes, shown: str) -> None:
    assert detach_keys.parse(written) == keys
    assert detach_keys.shown(keys) == shown


@pytest.mark.parametrize("written", ["", "ctrl-", "ctrl-p,", "ctrl-1", "escape", "ü", "ctrl-p ctrl-q"])
def test_keys_that_are_none_are_refused(written: str) -> None:
    with pytest.raises(errors.UsageError) as refused:
        detach_keys.parse(written)
    assert "ctrl-p,ctrl-q" in refused.value.hint
    assert detach_keys.parse("ctrl-p,ctrl-q"), "the fix"


@_ANY
@given(st.lists(st.text("abz", max_size=4), max_size=8), st.text("ab", min_size=1, max_size=4))
def test_typed_bytes_are_passed_on_up_to_keys(pieces: list[str], written: str) -> None:
    """In any pieces: all before the keys is passed on; without them all but a beginning of them."""
    keys, data = DetachKeys(written.encode()), "".join(pieces)
    passed, found = "", False
    for piece in pieces:
        more, found = keys.feed(piece.encode())
        passed += more.decode()
        if found:
            break
    at = data.find(written)
    if at >= 0:
        assert (passed, found) == (data[:at], True)
        return
    assert not found
    held = data[len(passed) :]
    assert data.startswith(passed)
    assert written.startswith(held)
    assert len(held) < len(written)
