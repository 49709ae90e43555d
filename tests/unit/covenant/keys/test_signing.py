"""From a package to its envelope, and the dev loop, whose signature holds nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covenant.keys import signing
from policy import errors
from policy import package as packages
from policy.manifest import parse
from policy.signing import trust
from sandbox.storage.trust_state import State
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY
PACKAGE = packages.Package(kit.FILES)
MANIFEST = parse.parse(kit.MANIFEST)


def _statement(files: dict[str, bytes], **terms: Any) -> Any:
    package = packages.Package(files)
    return signing.statement(
        package, parse.parse(package.manifest), signing.Terms(**({"serial": NOW} | terms)), now_ms=NOW
    )


def test_statement_says_what_was_chosen_and_what_is_there() -> None:
    made = _statement({**kit.FILES, "agent.toml": kit.MANIFEST + b"[custom]\nx = 1\n"}, audience="h", serial=5)
    assert (made.serial, made.audience, made.agent_id) == (5, "h", "hello")
    assert made.unknown_sections == ("custom",)
    assert made.not_before < NOW < made.expires_at == NOW + 90 * DAY
    assert set(made.subjects) == set(kit.FILES)
    assert made.roles_version >= 1
    assert made.deny_version >= 1


def test_what_is_signed_verifies_at_once_and_until_it_ends() -> None:
    statement = signing.statement(PACKAGE, MANIFEST, signing.Terms(serial=NOW, lifetime_ms=DAY), now_ms=NOW)
    signed = PACKAGE.with_envelope(signing.sign(statement, kit.key(1)))
    for moment in (NOW - signing.BACKDATE_MS, NOW, NOW + DAY - 1):
        kit.verify(signed, now_ms=moment)
    for moment in (NOW - signing.BACKDATE_MS - 1, NOW + DAY):
        with pytest.raises(errors.ExpiredError):
            kit.verify(signed, now_ms=moment)


def test_network_mode_must_be_written() -> None:
    without = kit.MANIFEST.replace(b'network = "off"', b"memory_mb = 64")
    _statement(kit.FILES)
    with pytest.raises(errors.ManifestError, match=r"resources\.network"):
        _statement({**kit.FILES, "agent.toml": without})


def test_unlimited_lifetime_needs_approval() -> None:
    unlimited = {**kit.FILES, "agent.toml": kit.MANIFEST + b"[lifetime]\nunlimited = true\n"}
    assert _statement(unlimited, approve_unlimited=True).approve_unlimited is True
    with pytest.raises(errors.ManifestError, match="unlimited lifetime") as caught:
        _statement(unlimited)
    assert caught.value.where.startswith("agent.toml:")


@pytest.mark.parametrize("name", ["__pycache__/main.cpython-311.pyc", ".git/HEAD", "main.py~", ".main.py.swp"])
def test_droppings_are_not_signed(name: str) -> None:
    with pytest.raises(errors.PackageError, match="was left by a program"):
        _statement({**kit.FILES, name: b""})


def test_envelope_is_replaced_whole_and_through_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"keep")
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "agent.dsse.json").symlink_to(outside)
    (folder / ".agent.dsse.json.new").symlink_to(outside)
    with signing.opened(folder) as directory:
        signing.write_envelope(directory, b"{}\n")
    assert (folder / "agent.dsse.json").read_bytes() == b"{}\n"
    assert not (folder / "agent.dsse.json").is_symlink()
    assert outside.read_bytes() == b"keep"
    assert [f.name for f in folder.iterdir()] == ["agent.dsse.json"]
    (folder / ".agent.dsse.json.new").write_bytes(b"half")
    with signing.opened(folder) as directory:
        signing.discard_unfinished(directory)
        signing.discard_unfinished(directory)
    assert [f.name for f in folder.iterdir()] == ["agent.dsse.json"]


def test_package_link_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("link", "missing"):
        with pytest.raises(errors.PackageError, match="cannot be opened"), signing.opened(tmp_path / name):
            pass


# --- dev ----------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    (tmp_path / "state").mkdir(mode=0o700)
    with State(tmp_path / "state") as made:
        made.init_root(kit.root_bytes(kit.root_document(), 1), NOW)
        yield made


def _dev(state: State, now_ms: int = NOW, package: packages.Package = PACKAGE) -> trust.TrustedPackage:
    manifest = parse.parse(package.manifest)
    signed, dev = signing.dev(package, manifest, state, host=kit.HOST, now_ms=now_ms)
    with dev:
        trusted = trust.verify(
            signed,
            dev.trust_root(now_ms),
            now_ms=now_ms,
            audience=kit.HOST,
            serials=dev,
            greatest_time_ms=dev.greatest_time_ms(),
        )
        dev.accept(trusted, now_ms=now_ms)
    return trusted


def test_dev_signs_and_verifies(state: State) -> None:
    trusted = _dev(state)
    assert [s.name for s in trusted.signers] == ["dev@local"]
    assert trusted.statement.audience == kit.HOST
    assert trusted.statement.expires_at == NOW + DAY
    edited = packages.Package({**kit.FILES, "main.py": b"edited"})
    assert _dev(state, NOW, edited).statement.serial > trusted.statement.serial


def test_what_dev_signed_is_accepted_nowhere_else(state: State) -> None:
    trusted = _dev(state)
    with pytest.raises(errors.UnknownKeyError):
        kit.verify(trusted.package, state.trust_root(NOW))
    assert state.accepted("hello") is None
    other = packages.Package({**kit.FILES, "agent.toml": kit.MANIFEST.replace(b'"hello"', b'"other"')})
    _dev(state, package=other)
    with state.dev("hello") as mine, state.dev("other") as theirs:
        kit.verify(trusted.package, mine.trust_root(NOW))
        with pytest.raises(errors.UnknownKeyError):
            kit.verify(trusted.package, theirs.trust_root(NOW))
        with pytest.raises(errors.AudienceError):
            kit.verify(trusted.package, mine.trust_root(NOW), audience="host-b")
        # Even with the key: its root lists this id alone.
        assert mine.trust_root(NOW).keys[0].scope == trust.Scope(
            agents=("hello",), roles=("*",), approve_unlimited=True
        )


def test_dev_goes_on_after_its_root_has_ended(state: State) -> None:
    first = _dev(state)
    later = NOW + 400 * DAY
    second = _dev(state, later)
    assert (first.root_version, second.root_version) == (1, 2)
    assert first.signers[0].keyid == second.signers[0].keyid


def test_operators_envelope_is_left_alone(state: State) -> None:
    trusted = _dev(state, package=kit.signed(1))
    assert [s.name for s in trusted.signers] == ["dev@local"]
