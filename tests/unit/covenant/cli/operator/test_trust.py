"""Check ``covenant trust``: each change makes one new version, logged first and pending until all have signed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from covenant.cli import common, times
from covenant.cli.operator import trust_update_steps
from covenant.keys import identity, trust_root
from policy import base58, errors
from policy.signing import envelope, proposal, revocation
from sandbox.audit.log import Ledger
from sandbox.storage import atomic_file
from sandbox.storage.trust_state import State
from tests import signing_kit as kit
from tests import ssh_agent_kit
from tests.cli_kit import call, document, done, refused

BY_ANN = ("--sign-with", "ann")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the caller's ssh-agent and pretend to be root: the trust state is in a temporary home."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: True)


@pytest.fixture
def public() -> dict[str, str]:
    """Make keys ann and bob, and ann's trust root; return the public keys."""
    keys = {name: document("keys", "new", name, "--no-passphrase")["public"] for name in ("ann", "bob", "eve")}
    done("trust", "init", "--key", "ann")
    return keys


@pytest.fixture
def package(tmp_path: Path, public: dict[str, str]) -> Path:
    folder = tmp_path / "pkg"
    for name, data in kit.FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def _rows(home: Path) -> list[dict[str, Any]]:
    lines = (home / "supervisor" / "audit" / "events.jsonl").read_text().splitlines()
    return [row for line in lines if (row := json.loads(line)["kind"])["type"] == "trust_changed"]


def _version() -> int:
    return int(document("trust", "show")["version"])


# --- one operator -----------------------------------------------------------------------------------------


def test_each_verb_is_one_version_in_log_state_and_working_copy(covenant_home: Path, public: dict[str, str]) -> None:
    steps: list[tuple[tuple[str, ...], str]] = [
        (("add", "bob", "--agents", "team-*", "--roles", "reader"), "adds `bob`"),
        (("set", "bob", "--threshold", "2", "--approve-unlimited"), "changes `bob`"),
        (("rotate", "bob", "--to", "eve", "--revoke", "laptop lost"), "removes `bob`"),
        (("revoke", "--manifest", "0" * 64, "--reason", "it leaks"), "revokes manifest 0000"),
        (
            ("revoke", "--agent", "hello", "--serial-at-most", "7", "--reason", "old", "--yes"),
            "revokes serials of agent `hello`",
        ),
        (("renew", "--expires", "500d"), "changes `ann`"),
        (("remove", "bob"), "removes `bob`"),
    ]
    for number, (arguments, says) in enumerate(steps, 2):
        made = document("trust", *arguments, *BY_ANN)
        assert (made["kind"], made["version"], made["decides"]) == ("trust_changed", number, True), made
        assert made["changes"][0].startswith(says), made["changes"]
        row = _rows(covenant_home)[-1]
        assert (row["version_from"], row["version_to"]) == (number - 1, number)
        assert row["changes"] == made["changes"]
        assert row["signers"] == ["ann"]
        with State(covenant_home / "supervisor") as state:
            assert state.root_version() == number
            assert state.present_root().raw == (covenant_home / "trust" / "root.json").read_bytes()
    shown = document("trust", "show")
    assert [k["name"] for k in shown["keys"]] == ["ann"]
    assert [k["name"] for k in shown["revoked"]["keys"]] == ["bob"]
    assert shown["pending"] is None
    text = done("trust", "show")
    for words in (
        "revoked key",
        "laptop lost",
        "revoked manifest",
        "revoked serials of hello up to 7",
        "signs the trust",
    ):
        assert words in text
    assert [row["version_to"] for row in _rows(covenant_home)] == list(range(1, 9))


def test_what_is_listed_is_what_was_asked_for(public: dict[str, str]) -> None:
    done("trust", "add", "bob", "--agents", "a*", "--agents", "b", "--roles", "reader", "--expires", "10d", *BY_ANN)
    done("trust", "add", "carol", "--public", public["eve"], "--root-only", "--threshold", "2", *BY_ANN)
    ann, bob, carol = document("trust", "show")["keys"]
    assert bob["scope"] == {"agents": ["a*", "b"], "roles": ["reader"], "approve_unlimited": False}
    assert (bob["root"], bob["threshold"], bob["public"]) == (False, 1, public["bob"])
    assert 9 * kit.DAY < bob["expires_at"] - times.now_ms() <= 10 * kit.DAY
    assert carol["scope"] == {"agents": [], "roles": [], "approve_unlimited": False}
    assert (carol["root"], carol["threshold"], carol["public"]) == (True, 2, public["eve"])
    assert carol["expires_at"] == ann["expires_at"]
    done("trust", "set", "bob", "--roles", "*", "--root", "--expires", "20d", *BY_ANN)
    bob = document("trust", "show")["keys"][1]
    assert bob["scope"] == {"agents": ["a*", "b"], "roles": ["*"], "approve_unlimited": False}
    assert (bob["root"], bob["threshold"]) == (True, 1)


def test_only_key_is_rotated_by_both_and_old_one_signs_no_more(package: Path, public: dict[str, str]) -> None:
    done("manifest", "sign", package, "--key", "ann")
    done("manifest", "verify", package)
    # bob's key is in this home and the new version needs it, so the command signs with it too.
    assert document("trust", "rotate", "ann", "--to", "bob", *BY_ANN)["version"] == 2
    (key,) = document("trust", "show")["keys"]
    assert (key["name"], key["public"]) == ("ann", public["bob"])
    refused("unknown_key", "manifest", "verify", package)
    done("manifest", "sign", package, "--key", "bob", "--fresh")
    done("manifest", "verify", package)
    refused("trust_root", "trust", "renew", "--expires", "400d", *BY_ANN)
    done("trust", "renew", "--expires", "400d", "--sign-with", "bob")


def test_key_in_place_of_another_holds_as_long_as_that_one(
    public: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done("trust", "add", "bob", "--expires", "30d", *BY_ANN)
    before = document("trust", "show")["keys"][1]
    done("trust", "rotate", "bob", "--to", "eve", *BY_ANN)
    after = document("trust", "show")["keys"][1]
    assert (after["public"], after["expires_at"]) == (public["eve"], before["expires_at"])
    real = times.now_ms()
    monkeypatch.setattr(times, "now_ms", lambda: real + 31 * kit.DAY)
    rotate = ("trust", "rotate", "bob", "--to", "bob", *BY_ANN)
    assert "has ended, and so would the one in its place" in refused("usage", *rotate).message
    done(*rotate, "--expires", "10d")
    assert document("trust", "show")["keys"][1]["expires_at"] == real + 41 * kit.DAY


def test_revocation_is_seen_by_verify(package: Path, public: dict[str, str]) -> None:
    done("trust", "add", "bob", *BY_ANN)
    done("manifest", "sign", package, "--key", "bob", "--serial", "5")
    done("manifest", "verify", package)
    done("trust", "revoke", "--key", "bob", "--reason", "laptop lost", *BY_ANN)
    assert "laptop lost" in refused("revoked", "manifest", "verify", package).message
    done("manifest", "sign", package, "--key", "ann", "--fresh", "--serial", "6")
    digest = document("manifest", "verify", package)["payload_digest"]
    made = document("trust", "revoke", "--package", package, "--reason", "it leaks", *BY_ANN)
    assert made["changes"] == [f"revokes manifest {digest}: it leaks"]
    assert "it leaks" in refused("revoked", "manifest", "verify", package).message
    done("manifest", "sign", package, "--key", "ann", "--serial", "8")
    done("manifest", "verify", package)
    serials = ("--agent", "hello", "--serial-at-most", "8", "--packages", package, "--yes")
    done("trust", "revoke", *serials, "--reason", "all of them", *BY_ANN)
    assert "all of them" in refused("revoked", "manifest", "verify", package).message
    done("manifest", "sign", package, "--key", "ann", "--serial", "9")
    done("manifest", "verify", package)
    refused("trust_root", "trust", "add", "bob", *BY_ANN)


def test_what_is_revoked_by_its_package_is_something_that_was_signed(package: Path, public: dict[str, str]) -> None:
    """A user who can write the package could replace its envelope; then the revocation would miss the real run."""
    done("manifest", "sign", package, "--key", "ann", "--serial", "5")
    file = package / "agent.dsse.json"
    signed = envelope.decode(file.read_bytes())
    decoy = envelope.Envelope(signed.payload.replace(b'"serial":5', b'"serial":4'), signed.payload_type, ())
    file.write_bytes(structs.replace(decoy, signatures=signed.signatures).encode())
    revoke = ("trust", "revoke", "--package", package, "--reason", "it leaks", *BY_ANN)
    assert "no key of the trust root signed" in refused("rule_2_signature", *revoke).message
    assert _version() == 1
    file.write_bytes(decoy.signed_by(decoy.sign(kit.key(9))).encode())
    assert "no key of the trust root signed" in refused("rule_2_signature", *revoke).message
    # Control: the real envelope is revoked, and the note says what it is.
    file.write_bytes(signed.encode())
    (package / "main.py").unlink()
    said = call(*revoke)
    assert "note: that is serial 5 of agent `hello`, signed by ann" in said.stderr
    assert _version() == 2


def test_unlimited_lifetime_is_approved_by_key_that_may(package: Path) -> None:
    (package / "agent.toml").write_bytes(kit.MANIFEST + b"[lifetime]\nunlimited = true\n")
    done("manifest", "sign", package, "--key", "ann", "--approve-unlimited")
    assert "approves an unlimited lifetime" in done("manifest", "sign", package, "--key", "ann", "--approve-unlimited")
    assert document("trust", "show")["keys"][0]["scope"]["approve_unlimited"] is True
    done("trust", "set", "ann", "--no-approve-unlimited", *BY_ANN)
    assert document("trust", "show")["keys"][0]["scope"]["approve_unlimited"] is False


def test_root_that_has_ended_is_renewed_by_its_own_keys(
    package: Path, public: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done("manifest", "sign", package, "--key", "ann", "--expires", "900d")
    real = times.now_ms()
    monkeypatch.setattr(times, "now_ms", lambda: real + 400 * kit.DAY)
    assert "has ended" in refused("trust_root", "manifest", "verify", package).message
    assert "nothing is run until the next version" in call("trust", "show").stderr
    assert "not signed" not in done("trust", "renew", *BY_ANN)
    done("manifest", "verify", package)


def test_what_another_process_wrote_is_shown_before_it_is_signed(
    covenant_home: Path, tmp_path: Path, public: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done("trust", "add", "bob", "--root", "--root-threshold", "2", "--sign-with", "ann", "--sign-with", "bob")
    done("trust", "add", "eve", *BY_ANN)
    done("trust", "export", tmp_path / "asked")

    def too_early(self: object, envelope: object) -> None:
        raise AssertionError("signed")

    with monkeypatch.context() as patched:
        patched.setattr("covenant.keys.signers.Signer.signature", too_early)
        result = call("trust", "import", tmp_path / "asked", "--key", "bob")
    assert str(result.exception) == "signed"
    assert "signing version 3, which\n  adds `eve`" in result.stderr
    monkeypatch.setattr("covenant.cli.operator.trust._somebody_there", lambda: True)
    result = call("trust", "import", tmp_path / "asked", "--key", "bob", stdin="n\n")
    assert result.exit_code == 1
    assert "Sign it?" in result.stderr
    assert _version() == 2
    done("trust", "import", tmp_path / "asked", "--key", "bob", stdin="y\n")
    assert _version() == 3


# --- several operators ------------------------------------------------------------------------------------------


@pytest.fixture
def bobs(tmp_path: Path) -> Path:
    """Make another operator's home, on another machine."""
    return tmp_path / "bobs-home"


def _at(home: Path, monkeypatch: pytest.MonkeyPatch, *, root: bool = False) -> None:
    monkeypatch.setenv("COVENANT_HOME", str(home))
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: root)


def test_two_operators_make_version_between_them(
    covenant_home: Path, bobs: Path, tmp_path: Path, public: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, asked, answered = (tmp_path / name for name in ("first.json", "asked.json", "answered.json"))
    digest = document("trust", "export", first)["payload_digest"]
    _at(bobs, monkeypatch)
    bob = document("keys", "new", "bob", "--no-passphrase")["public"]

    _at(covenant_home, monkeypatch, root=True)
    made = document("trust", "add", "bob", "--public", bob, "--root", "--root-threshold", "2", *BY_ANN)
    assert made["kind"] == "trust_pending"
    old, new = made["sides"]
    assert (old["signed"], old["missing"]) == (["ann"], 0)
    assert (new["signed"], new["open"], new["missing"]) == (["ann"], ["bob"], 1)
    assert (_version(), len(_rows(covenant_home))) == (1, 1)
    assert "version 2 waits for signatures" in done("trust", "show")
    assert "1 more of bob" in done("trust", "show")
    assert document("trust", "export", asked)["complete"] is False

    _at(bobs, monkeypatch)
    assert refused("trust_root", "trust", "import", asked).hint.endswith("covenant trust import FILE --first DIGEST")
    assert (
        "the digest of this trust root is"
        in refused("trust_root", "trust", "import", first, "--first", "0" * 64).message
    )
    done("trust", "import", first, "--first", digest)
    # First without a key: the command prints the changes and the missing signers, and signs nothing.
    looked = done("trust", "import", asked)
    assert "adds `bob`" in looked
    assert "root threshold 1 becomes 2" in looked
    assert "1 more of bob" in looked
    assert _version() == 1
    signed = document("trust", "import", asked, "--key", "bob")
    assert (signed["kind"], signed["version"]) == ("trust_changed", 2)
    assert not (bobs / "trust" / "next.json").exists()
    assert document("trust", "export", answered)["complete"] is True
    assert not (bobs / "supervisor").exists()

    _at(covenant_home, monkeypatch, root=True)
    assert document("trust", "import", answered)["kind"] == "trust_changed"
    assert _version() == 2
    assert _rows(covenant_home)[-1]["signers"] == ["ann", "bob"]
    assert document("trust", "import", answered) == {
        "kind": "trust_unchanged",
        "version": 2,
        "payload_digest": document("trust", "show")["payload_digest"],
    }
    # From now on one operator alone cannot make a version.
    assert document("trust", "renew", "--expires", "400d", *BY_ANN)["kind"] == "trust_pending"
    assert _version() == 2


def test_threshold_of_two_is_signed_by_two_operators_in_two_calls(package: Path, public: dict[str, str]) -> None:
    done("trust", "add", "bob", *BY_ANN)
    done("trust", "set", "bob", "--threshold", "2", *BY_ANN)
    done("manifest", "sign", package, "--key", "bob")
    assert "1 operators signed and 2 are needed" in refused("rule_2_signature", "manifest", "verify", package).message
    done("manifest", "sign", package, "--key", "ann")
    assert [s["name"] for s in document("manifest", "verify", package)["signers"]] == ["ann", "bob"]


def test_host_behind_is_brought_up_one_version_at_time(
    covenant_home: Path, bobs: Path, tmp_path: Path, public: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done("trust", "add", "bob", *BY_ANN)
    done("trust", "remove", "bob", *BY_ANN)
    digest = document("trust", "export", tmp_path / "1", "--version", "1")["payload_digest"]
    for version in (2, 3):
        done("trust", "export", tmp_path / str(version), "--version", str(version))
    refused("trust_root", "trust", "export", tmp_path / "4", "--version", "4")
    _at(bobs, monkeypatch, root=True)
    third = proposal.decode((tmp_path / "3").read_bytes()).payload_digest
    # A state begins with version 1; a working copy, which decides nothing, may begin with any version.
    assert "is version 1, not 3" in refused("trust_root", "trust", "import", tmp_path / "3", "--first", third).message
    done("trust", "import", tmp_path / "1", "--first", digest)
    assert "cannot follow 1" in refused("trust_root", "trust", "import", tmp_path / "3").message
    for version in (2, 3):
        assert document("trust", "import", tmp_path / str(version))["version"] == version
    assert document("trust", "show")["source"] == str(bobs / "supervisor")
    refused("trust_root", "trust", "import", tmp_path / "1", "--first", digest)
    refused("trust_root", "trust", "import", tmp_path / "2")
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path / "third-home"))
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: False)
    done("trust", "import", tmp_path / "3", "--first", third)
    assert _version() == 3


def test_without_root_only_working_copy_changes(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: False)
    done("keys", "new", "ann", "--no-passphrase")
    done("keys", "new", "bob", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    made = document("trust", "add", "bob", *BY_ANN)
    assert made["place"] == str(covenant_home / "trust" / "root.json")
    assert (made["kind"], made["decides"]) == ("trust_changed", False)
    assert _version() == 2
    said = call("trust", "revoke", "--key", "bob", "--reason", "lost", *BY_ANN)
    assert said.stdout.startswith("trust root version 3, in the working copy: ")
    assert "not in the supervisor's state, which decides" in said.stderr
    assert not (covenant_home / "supervisor").exists()
    assert (
        done("trust", "export", "-", "--version", "1").encode()
        == (covenant_home / "trust" / "root-00000001.json").read_bytes()
    )
    # For root the state comes first: a copy that any user could have written is no basis for it.
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: True)
    assert "has no trust root yet" in refused("trust_root", "trust", "remove", "bob", *BY_ANN).message


# --- what is refused ----------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "the last root key removed": ("trust_root", ("remove", "ann", *BY_ANN), "only key that signs the trust root"),
    "the only root key revoked": (
        "trust_root", ("revoke", "--key", "ann", "--reason", "x", *BY_ANN), "only key that signs the trust root"),
    "the only root key made none": ("trust_root", ("set", "ann", "--no-root", *BY_ANN), "only key that signs"),
    "a threshold that nobody meets": ("trust_root", ("add", "bob", "--threshold", "3", *BY_ANN), "ever meet"),
    "a root threshold that nobody meets": (
        "trust_root", ("add", "bob", "--root-threshold", "2", *BY_ANN), "could not be met by 1 root keys"),
    "a key that is listed": ("trust_root", ("add", "ann", *BY_ANN), "has a key `ann` already"),
    "a key listed under another name": ("trust_root", ("add", "x", "--public", "ANN", *BY_ANN), "as `ann`"),
    "a key in its own place": ("trust_root", ("rotate", "ann", "--to", "ann", *BY_ANN), "this key already"),
    "nobody removed": ("trust_root", ("remove", "nobody", *BY_ANN), "has no key `nobody`"),
    "nobody revoked": ("trust_root", ("revoke", "--key", "nobody", "--reason", "x", *BY_ANN), "has no key `nobody`"),
    "no digest": ("trust_root", ("revoke", "--manifest", "x", "--reason", "x", *BY_ANN), "cannot be made"),
    "an earlier end": ("trust_root", ("renew", "--expires", "1d", *BY_ANN), "end no later"),
    "a pattern that is none": ("trust_root", ("add", "bob", "--agents", "a*b", *BY_ANN), "cannot be made"),
    "signed by one who may not": ("trust_root", ("renew", "--expires", "400d", "--sign-with", "bob"), "not sign"),
    "signed by nobody": ("usage", ("renew", "--expires", "400d"), "a key that signs the next version is needed"),
    "signed by a missing key": ("key_file", ("renew", "--expires", "400d", "--sign-with", "carol"), "no key `carol`"),
    "no key at all": ("usage", ("add", *BY_ANN), "which key is to be listed is not said"),
    "a public key without a name": ("usage", ("add", "--public", "BOB", *BY_ANN), "no name of its own"),
    "a name that is none": ("usage", ("add", "a b", "--public", "BOB", *BY_ANN), "cannot be a name"),
    "a public key that is none": ("usage", ("add", "x", "--public", "00", *BY_ANN), "is no public key"),
    "a public key of small order": ("usage", ("add", "x", "--public", "01" + "00" * 31, *BY_ANN), "small order"),
    "two keys at once": ("usage", ("add", "x", "--public", "BOB", "--ssh-agent", "y", *BY_ANN), "one key is listed"),
    "no place to rotate to": ("usage", ("rotate", "ann", *BY_ANN), "one key takes its place"),
    "two to rotate to": ("usage", ("rotate", "ann", "--to", "bob", "--to-public", "BOB", *BY_ANN), "one key takes"),
    "nothing to revoke": ("usage", ("revoke", "--reason", "x", *BY_ANN), "one thing is revoked at a time"),
    "two things to revoke": (
        "usage", ("revoke", "--key", "bob", "--manifest", "0" * 64, "--reason", "x", *BY_ANN), "one thing is revoked"),
    "an agent without a serial": ("usage", ("revoke", "--agent", "a", "--reason", "x", *BY_ANN), "go together"),
    "a package that is not there": (
        "package_invalid", ("revoke", "--package", "/nowhere", "--reason", "x", *BY_ANN), "cannot be read"),
    "an agent that is not there": ("ssh_agent", ("add", "--ssh-agent", "x", *BY_ANN), "names no ssh-agent"),
    "a file that is not there": ("trust_root", ("import", "/nowhere"), "cannot be read"),
    "a folder": ("trust_root", ("import", "/"), "cannot be read"),
    "a device": ("trust_root", ("import", "/dev/null"), "is no plain file"),
    "two choices to export": ("usage", ("export", "x", "--present", "--version", "1"), "exclude each other"),
    "two documents on stdout": ("usage", ("export", "-", "--json"), "goes to a file"),
    "a first root to sign": ("usage", ("import", "COPY", "--first", "0" * 64, *BY_ANN), "signed already"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str, covenant_home: Path, public: dict[str, str]) -> None:
    code, arguments, says = REFUSED[name]
    stand_ins = {"ANN": public["ann"], "BOB": public["bob"], "COPY": str(covenant_home / "trust" / "root.json")}
    before = sorted(p.name for p in (covenant_home / "trust").iterdir())
    error = refused(code, "trust", *(stand_ins.get(word, word) for word in arguments))
    assert says in error.message, error.message
    assert _version() == 1
    assert sorted(p.name for p in (covenant_home / "trust").iterdir() if p.name != "lock") == before
    assert len(_rows(covenant_home)) == 1


def test_key_of_local_identity_is_never_listed(
    covenant_home: Path, public: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = (covenant_home / "identity" / "local.key").read_bytes()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from policy.signing import keyfile

    key = Ed25519PrivateKey.from_private_bytes(seed)
    raw = envelope.PublicKey.of(key).raw
    assert base58.encode(raw) == identity.issuer(covenant_home)["pubkey"]
    file = covenant_home / "keys" / "me.key"
    file.write_bytes(keyfile.plain(key))
    file.chmod(0o600)
    for arguments in (("add", "me"), ("add", "x", "--public", raw.hex()), ("rotate", "ann", "--to", "me")):
        assert "local identity" in refused("trust_root", "trust", *arguments, *BY_ANN).message
    # Nor in the first version.
    other = tmp_path / "other-home"
    monkeypatch.setenv("COVENANT_HOME", str(other))
    done("keys", "new", "ann", "--no-passphrase")
    identity.issuer(other)
    (other / "identity" / "local.key").write_bytes(seed)
    (other / "keys" / "me.key").write_bytes(keyfile.plain(key))
    (other / "keys" / "me.key").chmod(0o600)
    assert "local identity" in refused("trust_root", "trust", "init", "--key", "me").message
    done("trust", "init", "--key", "ann")


def test_nothing_holds_not_in_log(covenant_home: Path, public: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = (covenant_home / "trust" / "root.json").read_bytes()

    def full(self: object, *arguments: object, **more: object) -> str:
        # When the row is written, nothing has changed yet.
        assert (covenant_home / "trust" / "root.json").read_bytes() == before
        assert len(list((covenant_home / "supervisor" / "trust").iterdir())) == 1
        raise errors.LedgerError("the audit record could not be written")

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "append", full)
        assert isinstance(call("trust", "add", "bob", *BY_ANN).exception, errors.LedgerError)
    assert _version() == 1
    assert (covenant_home / "trust" / "root.json").read_bytes() == before
    done("trust", "add", "bob", *BY_ANN)


def test_two_steps_at_once_have_one_winner_and_one_line(
    covenant_home: Path, public: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other step runs after this one read the state: from this home, and from another that shares the state."""

    real = trust_root.advance
    for lock in (trust_root.check_holds_still, lambda held, home: None):

        def late(*arguments: Any, **more: Any) -> Any:
            with monkeypatch.context() as inner:
                inner.setattr(trust_root, "advance", real)
                done("trust", "renew", "--expires", f"{400 + _version()}d", *BY_ANN)
            return real(*arguments, **more)

        before, lines = _version(), len(_rows(covenant_home))
        with monkeypatch.context() as patched:
            patched.setattr(trust_root, "advance", late)
            patched.setattr(trust_root, "check_holds_still", lock)
            refused("trust_root", "trust", "add", "bob", *BY_ANN)
        assert (_version(), len(_rows(covenant_home))) == (before + 1, lines + 1)
        working = (covenant_home / "trust" / "root.json").read_bytes()
        assert working == (covenant_home / "supervisor" / "trust" / f"root-{before + 1:08d}.json").read_bytes()


def test_working_copy_does_not_stand_for_root_that_was_taken_away(
    covenant_home: Path, package: Path, public: dict[str, str]
) -> None:
    done("manifest", "sign", package, "--key", "ann")
    before = (covenant_home / "trust" / "root.json").read_bytes()
    done("trust", "revoke", "--package", package, "--reason", "it leaks", *BY_ANN)
    (covenant_home / "trust" / "root.json").write_bytes(before)
    refused("revoked", "manifest", "verify", package)
    installed = covenant_home / "supervisor" / "trust"
    installed.rename(covenant_home / "aside")
    for verb in (("manifest", "verify", package), ("trust", "show"), ("trust", "add", "bob", *BY_ANN)):
        assert "version 2 was installed and is gone" in refused("trust_root", *verb).message
    (covenant_home / "aside").rename(installed)
    refused("revoked", "manifest", "verify", package)


def test_working_copy_that_cannot_be_written_hides_no_version_that_holds(
    public: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: int, name: str, *more: Any, **options: Any) -> None:
        if name == "root.json":
            raise OSError(28, "No space left on device")
        real(directory, name, *more, **options)

    real = atomic_file.replace
    for decides, says in ((True, "version 2 is installed, but the working copy"), (False, "the working copy cannot")):
        with monkeypatch.context() as patched:
            patched.setattr(atomic_file, "replace", full)
            if not decides:
                patched.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: False)
                patched.setattr("covenant.keys.trust_root.is_ours", lambda path: False)
            message = refused("trust_root", "trust", "add", "bob", *BY_ANN).message
        assert message.startswith(says)
        assert message.endswith("No space left on device")
    assert _version() == 2


def test_version_that_never_held_is_not_handed_on(
    covenant_home: Path, tmp_path: Path, public: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is killed between the two files of the working copy; later there is another version 2."""
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: False)
    monkeypatch.setattr("covenant.keys.trust_root.is_ours", lambda path: False)

    def killed(directory: int, name: str, *more: Any, **options: Any) -> None:
        if name == "root.json":
            raise KeyboardInterrupt
        real(directory, name, *more, **options)

    real = atomic_file.replace
    with monkeypatch.context() as patched:
        patched.setattr(atomic_file, "replace", killed)
        call("trust", "add", "eve", *BY_ANN)
    assert (covenant_home / "trust" / "root-00000002.json").exists()
    assert _version() == 1
    done("trust", "add", "bob", *BY_ANN)
    done("trust", "renew", "--expires", "400d", *BY_ANN)
    done("trust", "export", tmp_path / "second", "--version", "2")
    names = [k.name for k in proposal.decode((tmp_path / "second").read_bytes()).document.keys]
    assert names == ["ann", "bob"]


def test_one_version_waits_at_time(covenant_home: Path, tmp_path: Path, public: dict[str, str]) -> None:
    done("trust", "add", "bob", "--root", "--root-threshold", "2", "--sign-with", "ann", "--sign-with", "bob")
    assert document("trust", "add", "eve", *BY_ANN)["kind"] == "trust_pending"
    kept = (covenant_home / "trust" / "next.json").read_bytes()
    assert (
        "is waiting for signatures"
        in refused("trust_root", "trust", "remove", "bob", "--root-threshold", "1", *BY_ANN).message
    )
    assert (covenant_home / "trust" / "next.json").read_bytes() == kept
    done("trust", "export", tmp_path / "eve")
    refused("trust_root", "trust", "export", tmp_path / "eve")
    done("trust", "export", tmp_path / "holds", "--present")
    assert document("trust", "import", tmp_path / "holds")["kind"] == "trust_unchanged"
    made = document("trust", "renew", "--expires", "400d", *BY_ANN, "--discard-pending")
    assert made["kind"] == "trust_pending"
    assert "is waiting" in refused("trust_root", "trust", "import", tmp_path / "eve", "--key", "bob").message
    # The same change again adds a signature to the pending version, also through the pending file itself.
    done("trust", "export", tmp_path / "renewed")
    assert document("trust", "import", tmp_path / "renewed", "--key", "bob")["kind"] == "trust_changed"
    assert _version() == 3
    assert not (covenant_home / "trust" / "next.json").exists()


TAMPERED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a scope": (lambda d: d["keys"][0]["scope"].update(approve_unlimited=False), "nobody who may sign"),
    "a key more": (lambda d: d["keys"].append(kit.operator(5)), "nobody who may sign"),
    "the version": (lambda d: d.update(version=3), "cannot follow 1"),
    "an unknown field": (lambda d: d.update(more=1), "malformed"),
    "the same again": (lambda d: None, ""),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_file_that_was_changed_on_its_way_is_signed_by_nobody(
    name: str, covenant_home: Path, tmp_path: Path, public: dict[str, str]
) -> None:
    made = document("trust", "add", "carol", "--public", public["bob"], "--root", "--root-threshold", "2", *BY_ANN)
    assert made["kind"] == "trust_pending"
    signed = envelope.decode((covenant_home / "trust" / "next.json").read_bytes())
    (covenant_home / "trust" / "next.json").unlink()
    change, says = TAMPERED[name]
    body = json.loads(signed.payload)
    change(body)
    payload = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    file = tmp_path / "changed"
    file.write_bytes(envelope.Envelope(payload, signed.payload_type, signed.signatures).encode())
    if not says:
        assert document("trust", "import", file)["kind"] == "trust_pending"
        return
    assert says in refused("trust_root", "trust", "import", file).message
    assert not (covenant_home / "trust" / "next.json").exists()


def test_damaged_pending_file_is_said_and_can_be_dropped(covenant_home: Path, public: dict[str, str]) -> None:
    file = covenant_home / "trust" / "next.json"
    file.write_bytes(b"{}")
    file.chmod(0o600)
    assert "malformed" in refused("trust_root", "trust", "add", "bob", *BY_ANN).message
    shown = call("trust", "show")
    assert (shown.exit_code, "ann" in shown.stdout, "cannot be read" in shown.stderr) == (0, True, True)
    done("trust", "add", "bob", *BY_ANN, "--discard-pending")
    assert not file.exists()
    assert _version() == 2


@pytest.mark.parametrize("name", ["a", "ann@laptop", "A.b_c-9", "a" * 64, "a" * 65, "", ".a", "-a", "a b", "a\n", "é"])
def test_name_is_what_root_can_list(name: str) -> None:
    fits = re.fullmatch(revocation.NAME_PATTERN[1:-1], name) is not None
    try:
        taken = trust_update_steps.check_name(name) == name
    except errors.UsageError:
        taken = False
    assert taken is fits


def test_emergency_revocation_says_who_waits_now(public: dict[str, str]) -> None:
    done("trust", "add", "bob", *BY_ANN)
    done("trust", "add", "eve", *BY_ANN)
    for name in ("bob", "eve"):
        done("trust", "set", name, "--threshold", "2", "--agents", "team-*", *BY_ANN)
    done("trust", "set", "ann", "--agents", "own", *BY_ANN)
    result = call("trust", "revoke", "--key", "eve", "--reason", "laptop lost", *BY_ANN)
    assert result.exit_code == 0
    assert "note: `bob` waits for other signers" in result.stderr


# --- ssh-agent ------------------------------------------------------------------------------------------------------


def test_keys_of_ssh_agent_are_trusted_and_sign_roots_and_packages(
    covenant_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    package = tmp_path / "pkg"
    for name, data in kit.FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(data)
    with ssh_agent_kit.running(folder) as agent:
        monkeypatch.setenv("SSH_AUTH_SOCK", agent.socket)
        agent.add("ann@laptop")
        agent.add("bob laptop")
        done("trust", "init", "--ssh-agent", "ann@laptop")
        listed = {row["comment"]: row for row in document("keys", "list")["agent"]}
        (ann,) = document("trust", "show")["keys"]
        assert (ann["name"], ann["keyid"]) == ("ann@laptop", listed["ann@laptop"]["keyid"])
        by_ann = ("--sign-with-agent", "ann@laptop")
        # If the key's comment cannot be a name, the command asks for one; a fingerprint selects the key as well.
        refused("usage", "trust", "add", "--ssh-agent", "bob laptop", *by_ann)
        done("trust", "add", "bob", "--ssh-agent", listed["bob laptop"]["fingerprint"], *by_ann)
        assert [k["name"] for k in document("trust", "show")["keys"]] == ["ann@laptop", "bob"]
        done("manifest", "sign", package, "--ssh-agent", "bob laptop")
        assert [s["name"] for s in document("manifest", "verify", package)["signers"]] == ["bob"]
        done("keys", "new", "file", "--no-passphrase")
        done("trust", "rotate", "ann@laptop", "--to", "file", "--name", "ann", *by_ann)
        assert [k["name"] for k in document("trust", "show")["keys"]] == ["ann", "bob"]
        done("trust", "rotate", "bob", "--to-agent", "ann@laptop", "--sign-with", "file")
    assert [row["operator"] for row in _rows(covenant_home)] == ["ann@laptop", "ann@laptop", "ann", "ann"]


def test_key_id_is_no_public_key(public: dict[str, str]) -> None:
    made = call("keys", "new", "carol", "--no-passphrase")
    keyid = made.stdout.strip()
    assert "this is the id of `carol`; its public key, for `trust add NAME --public`:" in made.stderr
    error = refused("usage", "trust", "add", "carol", "--public", keyid, *BY_ANN)
    assert error.message == f"`{keyid}` is the id of the key `carol`, not its public key"
    assert error.hint == "covenant keys public carol"
    refused("usage", "trust", "rotate", "ann", "--to-public", keyid, *BY_ANN)
    # The fix.
    fixed = done("keys", "public", "carol").strip()
    done("trust", "add", "carol", "--public", fixed, *BY_ANN)
    (common.home() / "keys/carol.key").unlink()
    error = refused("usage", "trust", "add", "dave", "--public", keyid, *BY_ANN)
    assert "is the id of the key `carol` of the trust root" in error.message
