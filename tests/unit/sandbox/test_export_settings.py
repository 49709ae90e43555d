"""The file of header lines for a collector."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy import errors
from sandbox import export_settings


def _headers(path: Path, content: bytes) -> dict[str, str]:
    path.touch(0o600)
    path.write_bytes(content)
    return export_settings.headers(path)


def test_missing_headers_name_their_form(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="No such file") as refused:
        export_settings.headers(tmp_path / "headers")
    assert refused.value.hint == "write lines `Name: value` there, with mode 0600"


def test_lines_are_headers(tmp_path: Path) -> None:
    found = _headers(tmp_path / "headers", b"Authorization: Bearer a:b\n\nX-Scope:  one \r\n")
    assert found == {"Authorization": "Bearer a:b", "X-Scope": "one"}


@pytest.mark.parametrize(
    "content", [b"X: \xc3\xa9", b"X: " + b"a" * (16 * 1024), b"X", b"X Y: a", b": a", b"X: a\x00b", b"X: a\x7f"]
)
def test_credential_that_would_be_changed_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(errors.ConfigError, match="headers"):
        _headers(tmp_path / "headers", content)
