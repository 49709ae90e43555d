"""Sources that were made to take long, or to be read in two ways."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policy import errors
from policy.importing import documents, formats
from policy.importing.vocabulary import Context

CONTEXT = Context("imported", home="/home/ada", base="/srv/app")


def _manifest(name: str, source: dict[str, Any]) -> str:
    return formats.read(name, json.dumps(source).encode(), CONTEXT).manifest_text


def test_long_list_is_refused_with_its_place() -> None:
    hosts = [f"h{number}.example" for number in range(documents.MAX_ITEMS + 1)]
    with pytest.raises(errors.ImportSourceError, match="1001 items, an import takes 1000") as refused:
        _manifest("srt", {"network": {"allowedDomains": hosts, "deniedDomains": []}})
    assert "allowedDomains" in refused.value.where
    # The fix: fewer of them.
    assert "h0.example" in _manifest("srt", {"network": {"allowedDomains": hosts[:-1], "deniedDomains": []}})


def test_denied_path_with_backslash_denies_all() -> None:
    allowed = {"permissions": {"allow": ["Read(//srv/docs/**)"], "deny": []}}
    assert "/srv/docs" in _manifest("claude", allowed)
    allowed["permissions"]["deny"] = ["Read(//srv\\/docs/keys)"]
    assert "/srv/docs" not in _manifest("claude", allowed)
