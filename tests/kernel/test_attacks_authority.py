"""Attacks on authority and evidence through a whole run: who is named, and what may stand in for what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant import signing
from policy import errors
from policy.signing import envelope, root, strict_json
from sandbox import package as packages
from sandbox.state import State
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
        return {"name": name, "public": public, "scope": {"agents": ["*"], "roles": roles}, "threshold": 1, **bounds}

    keys = [operator("bob", BOB, ["reader"]), operator("tester", world.key, ["*"])]
    document = {"version": 2, "threshold": 1, "keys": keys, **bounds}
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


def test_an_operator_who_did_not_sign_is_named_in_no_row(two: World) -> None:
    path = _sign_by(two, _package(two, operator="tester", role="reader"), BOB)
    with pytest.raises(errors.SignatureError, match="who did not sign"):
        two.run(path)
    assert _operators(two) == [("manifest_rejected", None)]


def test_a_signer_whose_signature_does_not_count_is_named_in_no_row(two: World) -> None:
    # bob comes first in the root and may not sign a manifest without a role: the run is the tester's alone.
    assert two.run(_sign_by(two, _package(two), BOB, two.key)).error is None
    rows = two.rows()
    assert {row["kind"]["operator"] for row in rows} == {"tester"}
    assert [row["kind"]["signers"] for row in rows if row["kind"]["type"] == "run_started"] == [["tester"]]


def test_control_an_operator_who_signed_is_named_in_every_row(two: World) -> None:
    assert two.run(_sign_by(two, _package(two, role="reader"), BOB)).error is None
    assert {row["kind"]["operator"] for row in two.rows()} == {"bob"}
    assert two.run(_sign_by(two, _package(two, role="reader", operator="tester"), BOB, two.key)).error is None
    started = [row["kind"] for row in two.rows() if row["kind"]["type"] == "run_started"]
    assert [(one["operator"], one["signers"]) for one in started] == [("bob", ["bob"]), ("tester", ["bob", "tester"])]
