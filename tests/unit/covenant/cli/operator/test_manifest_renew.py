"""``covenant manifest renew``: the same files under a later end, and nothing else."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from policy.signing import envelope, statement
from tests import signing_kit as kit
from tests.cli_kit import call, document, done, refused

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


def _refusal(package: Path, key: str = "ann") -> dict[str, Any]:
    """Renew one package, which is refused. Returns the error, after checking that text output has it whole."""
    renew = ("manifest", "renew", package, "--key", key)
    said, (row,) = call(*renew), json.loads(call(*renew, "--json").stdout)["packages"]
    error: dict[str, Any] = row["error"]
    assert said.exit_code == 1
    assert f"refused: {package}: {error['message']}" in said.stderr
    assert f"  fix: {error['hint']}\n" in said.stderr
    return error


def _typed(command: str) -> None:
    """Type the command of a fix."""
    name, *arguments = shlex.split(command)
    assert name == "covenant"
    done(*arguments)


def test_each_fix_of_a_refused_package_works(agents: Path) -> None:
    one = agents / "one"
    done("keys", "new", "bob", "--no-passphrase")
    sign = f"covenant manifest sign {one} --key"

    def unsigned() -> None:
        (one / "agent.dsse.json").unlink()

    def unreadable() -> None:
        (one / "agent.dsse.json").write_text("{}")

    def changed() -> None:
        (one / "main.py").write_text("print('other')\n")

    for spoil, says, fix in (
        (unsigned, "it was never signed", f"{sign} ann"),
        (unreadable, "its envelope cannot be read", f"{sign} ann --fresh"),
        (changed, "its files are not those that were signed", f"look at its files, then: {sign} ann"),
    ):
        spoil()
        error = _refusal(one)
        assert (error["message"], error["hint"]) == (says, fix)
        _typed(fix.rpartition("then: ")[2])
        done("manifest", "renew", one, "--key", "ann")
    # Another key: the one that signed it, and without its file a new statement.
    error = _refusal(one, "bob")
    assert error["hint"] == "give a key that signed it: --key ann"
    done("manifest", "renew", one, "--key", "ann")
    next(Path(os.environ["COVENANT_HOME"], "keys").glob("ann*")).unlink()
    error = _refusal(one, "bob")
    assert (error["message"], error["hint"]) == ("this key has not signed it", f"{sign} bob --fresh")
    _typed(error["hint"])
    done("manifest", "renew", one, "--key", "bob")


def test_each_fix_of_an_unreadable_package_works(agents: Path) -> None:
    one, manifest = agents / "one", agents / "one" / "agent.toml"
    written = manifest.read_text()
    manifest.write_text(written + "[\n")
    assert _refusal(one)["hint"] == "keys are letters, digits, `_` and `-`"
    manifest.write_text(written)
    os.mkfifo(one / "pipe")
    assert _refusal(one)["hint"] == "take it out of the package"
    (one / "pipe").unlink()
    (one / "a\u202eb").write_text("")
    assert "take it out of the package" in _refusal(one)["hint"]
    (one / "a\u202eb").unlink()
    with (one / "agent.dsse.json").open("ab") as stream:
        stream.truncate(20 << 20)
    assert _refusal(one)["hint"] == "remove it, then sign the package again"
    (one / "agent.dsse.json").unlink()
    _typed(_refusal(one)["hint"])
    (agents / "link").symlink_to("one")
    assert _refusal(agents / "link")["hint"] == "give the directory that it leads to"
    done("manifest", "renew", one, "--key", "ann")


def test_each_fix_of_a_wrong_directory_works(agents: Path, tmp_path: Path) -> None:
    one = agents / "one"
    error = refused("package_invalid", "manifest", "renew", agents / "ona", "--key", "ann")
    assert error.hint == f"did you mean `{one}`?"
    error = refused("package_invalid", "manifest", "renew", agents / "one" / "main.py", "--key", "ann")
    assert error.hint == "give a directory that you may list: a package, or one that contains packages"
    (empty := tmp_path / "empty").mkdir()
    error = refused("package_invalid", "manifest", "renew", empty, "--key", "ann")
    assert f"covenant manifest new {empty}/ID" in error.hint
    done("manifest", "new", empty / "three")
    done("manifest", "sign", empty / "three", "--key", "ann")
    done("manifest", "renew", empty, one, "--key", "ann")


def test_package_that_cannot_be_written_stops_no_other(agents: Path) -> None:
    command = [sys.executable, "-m", "covenant", "manifest", "renew", str(agents), "--key", "ann", "--json"]
    full = subprocess.run(["prlimit", "--fsize=0", *command], capture_output=True, text=True, timeout=120, check=False)
    rows = json.loads(full.stdout)["packages"]
    assert full.returncode == 1
    assert [(row["error"]["code"], bool(row["error"]["hint"])) for row in rows] == [("package_invalid", True)] * 2


def test_passphrase_is_asked_once_for_all_packages(agents: Path) -> None:
    made = call("keys", "new", "eve", "--passphrase-file", "-", stdin="open\n")
    assert made.exit_code == 0
    for name in ("one", "two"):
        sign = ("manifest", "sign", agents / name, "--key", "eve", "--fresh", "--passphrase-file", "-")
        assert call(*sign, stdin="open\n").exit_code == 0
    renew = ("manifest", "renew", agents, "--key", "eve", "--passphrase-file", "-")
    assert call(*renew, stdin="open\n").exit_code == 0


def test_renew_by_unlisted_key_warns(agents: Path) -> None:
    """After a rotation the old key signs nothing that runs: renew says so, and no fix sends the operator back to it."""
    done("keys", "new", "ann-2027", "--no-passphrase")
    done("trust", "rotate", "ann", "--to", "ann-2027", "--sign-with", "ann", "--packages", agents, "--yes")
    said = call("manifest", "renew", agents / "one", "--key", "ann")
    assert "warning: key `ann` is not in the trust root of this host: runs here refuse its signature" in said.stderr
    assert "another key is listed as `ann`" in said.stderr
    error = _refusal(agents / "one", "ann-2027")
    assert error["hint"] == f"covenant manifest sign {agents / 'one'} --key ann-2027 --fresh"
    _typed(error["hint"])
    said = call("manifest", "renew", agents / "one", "--key", "ann-2027")
    assert (said.exit_code, said.stderr) == (0, "")
    done("manifest", "verify", agents / "one")
