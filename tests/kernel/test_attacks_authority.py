"""Attacks on authority and evidence through a whole run: who is named, and what may stand in for what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.keys import signing
from policy import decide, errors
from policy.audit_log import chain
from policy.signing import change, envelope, root, strict_json, trust
from sandbox import config
from sandbox.storage import package_reader as packages
from sandbox.storage.trust_state import State
from sandbox.supervisor import Request, RunResult, Supervisor
from tests import signing_kit as kit
from tests.kernel.world import HEAD, TAIL, World

pytestmark = pytest.mark.kernel

CODE = HEAD + "answer = 1" + TAIL
BOB = kit.key(2)


@pytest.fixture
def two(world: World) -> World:
    """A world whose second root lists bob, who may sign for readers only, before the tester, who may sign anything."""
    bounds = {"not_before": world.now_ms - 1000, "expires_at": world.now_ms + 90 * kit.DAY}

    def operator(name: str, key: Ed25519PrivateKey, roles: list[str]) -> dict[str, Any]:
        public = envelope.PublicKey.of(key).raw.hex()
        scope = kit.scope(roles=tuple(roles))
        return {"name": name, "public": public, "scope": scope, "root": roles == ["*"], "threshold": 1, **bounds}

    keys = [operator("bob", BOB, ["reader"]), operator("tester", world.key, ["*"])]
    document = {"version": 2, "threshold": 1, "keys": keys, "revoked": kit.revoked(), **bounds}
    with State(world.state) as state:
        # Control of the other direction: bob alone cannot make himself anything.
        greedy = {**document, "keys": [operator("bob", BOB, ["*"])]}
        with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
            state.replace_root(_signed(greedy, BOB), world.now_ms)
        state.replace_root(_signed(document, world.key), world.now_ms)
        greedy["version"] = 3
        with pytest.raises(errors.TrustError, match="is not signed by the keys of version 2"):
            state.replace_root(_signed(greedy, BOB), world.now_ms)
    return world


def _signed(document: dict[str, Any], *keys: Ed25519PrivateKey) -> bytes:
    return envelope.sign(strict_json.dumps(document), root.PAYLOAD_TYPE, keys).encode()


def _sign_by(world: World, path: Path, *keys: Ed25519PrivateKey) -> Path:
    """As ``world.sign``, by several keys."""
    world.sign(path)
    read = packages.read(path)
    assert read.envelope is not None
    payload = envelope.decode(read.envelope).payload
    signing.write_envelope(path, envelope.sign(payload, envelope.IN_TOTO_PAYLOAD_TYPE, keys).encode())
    return path


def _package(world: World, **agent: str) -> Path:
    path = world.package({"main.py": CODE})
    manifest = path / "agent.toml"
    more = "".join(f'{key} = "{value}"\n' for key, value in agent.items())
    manifest.write_text(manifest.read_text().replace("[agent]\n", f"[agent]\n{more}"))
    return path


def _operators(world: World) -> list[tuple[str, str | None]]:
    return [(row["kind"]["type"], row["kind"]["operator"]) for row in world.rows()]


def test_operator_who_did_not_sign_is_named_in_no_row(two: World) -> None:
    path = _sign_by(two, _package(two, operator="tester", role="reader"), BOB)
    with pytest.raises(errors.SignatureError, match="who did not sign"):
        two.run(path)
    assert {who for _, who in _operators(two)} == {None}
    assert _operators(two)[-1][0] == "manifest_rejected"


def test_signer_whose_signature_does_not_count_is_named_in_no_row(two: World) -> None:
    # bob comes first in the root and may not sign a manifest without a role: the run is the tester's alone.
    assert two.run(_sign_by(two, _package(two), BOB, two.key)).error is None
    rows = two.rows()
    assert {row["kind"]["operator"] for row in rows} == {"tester"}
    assert [row["kind"]["signers"] for row in rows if row["kind"]["type"] == "run_started"] == [["tester"]]


def test_control_operator_who_signed_is_named_in_every_row(two: World) -> None:
    assert two.run(_sign_by(two, _package(two, role="reader"), BOB)).error is None
    assert {row["kind"]["operator"] for row in two.rows()} == {"bob"}
    assert two.run(_sign_by(two, _package(two, role="reader", operator="tester"), BOB, two.key)).error is None
    started = [row["kind"] for row in two.rows() if row["kind"]["type"] == "run_started"]
    assert [(one["operator"], one["signers"]) for one in started] == [("bob", ["bob"]), ("tester", ["bob", "tester"])]


def test_what_was_revoked_starts_no_more_and_row_says_why(two: World) -> None:
    by_bob = _sign_by(two, _package(two, role="reader"), BOB)
    assert two.run(by_bob).error is None
    with State(two.state) as state:
        gone = change.revoke_key(state.present_root().document, "bob", now_ms=two.now_ms, reason="laptop lost")
        state.replace_root(gone.signed_by(gone.envelope.sign(two.key)).encode(), two.now_ms)
    with pytest.raises(errors.RevokedError, match="laptop lost"):
        two.run(by_bob)
    row = two.rows()[-1]["kind"]
    assert (row["type"], row["code"], row["rule"]) == ("manifest_rejected", "revoked", 2)
    # The same files by another operator are another matter, until that statement is revoked as well.
    by_tester = _sign_by(two, by_bob, two.key)
    with State(two.state) as state:
        present = state.present_root()
        trusted = trust.verify(
            packages.read(by_tester), present, now_ms=two.now_ms, audience=config.load(two.state).host, serials=state
        )
        leaks = change.revoke_manifest(present.document, trusted.payload_digest, now_ms=two.now_ms, reason="it leaks")
        state.replace_root(leaks.signed_by(leaks.envelope.sign(two.key)).encode(), two.now_ms)
    with pytest.raises(errors.RevokedError, match="it leaks"):
        two.run(by_tester)
    assert two.run(two.sign(by_tester)).error is None


# --- attacks that fail ----------------------------------------------------------------------------------------


def test_what_dev_signed_runs_under_no_other_authority(two: World) -> None:
    package = packages.read(_package(two))
    host = config.load(two.state).host
    with State(two.state) as state:
        signed, dev_state = signing.dev(package, decide.manifest_of(package), state, host=host, now_ms=two.now_ms)
        dev_state.close()
        other = _package(two, role="reader")
        text = (other / "agent.toml").read_text().replace('id = "probe"', 'id = "other"')
        (other / "agent.toml").write_text(text)
        read = packages.read(other)
        signing.dev(read, decide.manifest_of(read), state, host=host, now_ms=two.now_ms)[1].close()

    def run(dev: str) -> RunResult:
        with Supervisor(two.state, never_granted=(str(two.home),)) as supervisor:
            return supervisor.run(Request(signed, "hi", two.issuer, dev=dev))

    assert run("probe").error is None
    for authority in ("", "other"):
        with pytest.raises(errors.UnknownKeyError):
            run(authority)
    with pytest.raises(errors.TrustError, match="no trust root"):
        run("probe2")
    # Nor does what an operator signed count in the dev state of the same id.
    operators = packages.read(_sign_by(two, _package(two), two.key))
    with Supervisor(two.state) as supervisor, pytest.raises(errors.UnknownKeyError):
        supervisor.run(Request(operators, "hi", two.issuer, dev="probe"))


def test_key_for_roles_signs_nothing_that_no_role_bounds(two: World) -> None:
    # Without a sandbox no role is held, so a key that is bound to roles cannot sign it with one or without.
    local = {"backend": "trusted-local", "required": "false"}
    for role, refusal in ((None, errors.UnknownKeyError), ("reader", errors.BackendError)):
        path = two.package({"main.py": CODE}, **local)
        if role:
            text = (path / "agent.toml").read_text().replace("[agent]\n", f'[agent]\nrole = "{role}"\n')
            (path / "agent.toml").write_text(text)
        with pytest.raises(refusal):
            two.run(_sign_by(two, path, BOB))
    assert two.run(_sign_by(two, two.package({"main.py": CODE}, **local), two.key)).error is None


def test_one_signature_is_not_another(two: World) -> None:
    """A trust root as an envelope, an envelope as a trust root: each by a key that both accept."""
    path = _package(two)
    good = packages.read(_sign_by(two, path, two.key)).envelope
    assert good is not None
    with State(two.state) as state:
        signing.write_envelope(path, state.present_root().raw)
        with pytest.raises(errors.SignatureError, match="payload type"):
            two.run(path)
        with pytest.raises(errors.TrustError, match="payload type"):
            state.replace_root(good, two.now_ms)
        # The statement under the other type is no statement, under any signature.
        payload = envelope.decode(good).payload
        as_root = envelope.sign(payload, root.PAYLOAD_TYPE, [two.key])
        signing.write_envelope(path, as_root.encode())
        with pytest.raises(errors.SignatureError, match="payload type"):
            two.run(path)
        renamed = envelope.Envelope(payload, envelope.IN_TOTO_PAYLOAD_TYPE, as_root.signatures)
        signing.write_envelope(path, renamed.encode())
        with pytest.raises(errors.SignatureError, match="does not fit"):
            two.run(path)
        # Nor is the signature of a log's head, by the same key, one of a payload that looks like the head.
        head = json.loads(chain.sign_head(chain.Head(), two.key))
        signature = envelope.Signature("", bytes.fromhex(head.pop("signature_hex")))
        body = json.dumps(head, separators=(",", ":")).encode()
        for text in (body, b"covenant.audit.head.v1\n" + body):
            forged = envelope.Envelope(text, envelope.IN_TOTO_PAYLOAD_TYPE, (signature,))
            signing.write_envelope(path, forged.encode())
            with pytest.raises(errors.UnknownKeyError):
                two.run(path)
    signing.write_envelope(path, good)
    assert two.run(path).error is None
