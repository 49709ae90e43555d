"""``covenant manifest renew``: the same files under a later end, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policy.signing import envelope, statement
from tests import signing_kit as kit
from tests.cli_kit import call, document, done

DAY = 86_400_000


@pytest.fixture
def agents(tmp_path: Path, covenant_home: Path) -> Path:
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    for name in ("one", "two"):
        for file, data in kit.FILES.items():
            (tmp_path / "agents" / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "agents" / name / file).write_bytes(data)
    done("manifest", "sign", tmp_path / "agents/one", "--key", "ann", "--expires", "10d", "--audience", "host-a")
    done("manifest", "sign", tmp_path / "agents/two", "--key", "ann", "--expires", "60d")
    return tmp_path / "agents"


def _statement(package: Path) -> statement.Statement:
    return statement.parse(envelope.decode((package / "agent.dsse.json").read_bytes()).payload)


def test_renew_signs_unchanged_packages_for_longer(agents: Path) -> None:
    before = _statement(agents / "one")
    made = document("manifest", "renew", agents, "--key", "ann", "--expires", "90d")
    assert [row["error"] for row in made["packages"]] == [None, None]
    after = _statement(agents / "one")
    assert after.expires_at - before.expires_at > 79 * DAY
    assert (after.audience, dict(after.subjects)) == ("host-a", dict(before.subjects))
    assert after.serial > before.serial
    done("manifest", "verify", agents / "two")


def test_renew_lasts_as_long_as_before_and_only_within(agents: Path) -> None:
    two = (agents / "two" / "agent.dsse.json").read_bytes()
    made = document("manifest", "renew", agents, "--key", "ann", "--within", "14d")
    assert len(made["packages"]) == 1
    assert (agents / "two" / "agent.dsse.json").read_bytes() == two
    one = _statement(agents / "one")
    assert abs(one.expires_at - one.not_before - 5 * 60_000 - 10 * DAY) < 1000


def test_renew_refuses_changed_unsigned_and_foreign(agents: Path) -> None:
    (agents / "one" / "main.py").write_text("print('other')\n")
    (agents / "two" / "agent.dsse.json").unlink()
    done("keys", "new", "bob", "--no-passphrase")

    def refusals(key: str, *more: str) -> list[str]:
        said = call("manifest", "renew", str(agents), "--key", key, "--json", *more)
        rows: list[dict[str, Any]] = json.loads(said.stdout)["packages"]
        assert said.exit_code == 1
        return [row["error"]["code"] for row in rows]

    assert refusals("ann") == ["digest_mismatch", "unsigned"]
    assert refusals("bob") == ["unknown_key", "unsigned"]
    # The fixes.
    for name in ("one", "two"):
        done("manifest", "sign", agents / name, "--key", "ann")
    done("manifest", "renew", agents, "--key", "ann")
