"""Refusals of ``covenant trust``: when they come, and that each printed fix works."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy import errors
from tests import signing_kit as kit
from tests.cli_kit import call, document, done


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the caller's ssh-agent and pretend to be root: the trust state is in a temporary home."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: True)


def test_refused_version_asks_about_no_package(covenant_home: Path) -> None:
    for name in ("ann", "bob", "bob-new"):
        done("keys", "new", name, "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("trust", "add", "bob", "--sign-with", "ann")
    package = covenant_home / "agents" / "hello"
    for name, data in kit.FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(data)
    done("manifest", "sign", package, "--key", "bob")
    rotate = ("trust", "rotate", "bob", "--to", "bob-new", "--sign-with")
    unlisted, unknown = call(*rotate, "bob"), call(*rotate, "nobody")
    assert "the key `bob` does not sign trust roots" in str(unlisted.exception)
    assert isinstance(unknown.exception, errors.KeyFileError)
    # A version that waits for a second signature.
    done("trust", "add", "bob-new", "--root", "--root-threshold", "2", "--sign-with", "ann")
    done("trust", "renew", "--sign-with", "ann")
    remove = ("trust", "remove", "bob", "--sign-with", "ann", "--sign-with", "bob-new")
    waiting = call(*remove)
    assert "is waiting for signatures" in str(waiting.exception)
    assert [said.stderr for said in (unlisted, unknown, waiting)] == ["", "", ""]
    # The fixes: keys that sign roots, and the waiting version dropped.
    assert document(*remove, "--discard-pending", "--yes")["version"] == 4
