"""Check each change of a trust root: one new version, no silent weakening, and a description before it is signed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policy import errors
from policy.signing import change, proposal
from policy.signing.root import RootDocument
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY
op = kit.operator
ID2 = kit.public(2).keyid


def document(*operators: dict[str, Any], **changes: Any) -> RootDocument:
    return RootDocument.model_validate(kit.root_document(*operators, **changes))


TWO = document(op(1), op(2))
# A key for roots alone, and two keys that need each other.
PARTNERS = document(
    op(1, scope=kit.scope(agents=())),
    *(op(n, threshold=2, root=False, scope=kit.scope(agents=("c*",))) for n in (2, 3)),
)


def _lines(old: RootDocument, made: proposal.Proposal) -> tuple[str, ...]:
    return change.describe(old, made.document, str)


def test_each_change_is_one_version_on_and_says_what_it_does() -> None:
    made: dict[str, tuple[proposal.Proposal, str]] = {
        "add": (change.add(TWO, op(3)), "adds `op3`"),
        "update": (change.update(TWO, "op2", {"threshold": 2}), "changes `op2`"),
        "remove": (change.remove(TWO, "op2"), "removes `op2`"),
        "rotate": (change.rotate(TWO, "op2", kit.public(3).raw.hex(), now_ms=NOW, expires_at=NOW + 1), "removes `op2`"),
        "revoke": (change.revoke_key(TWO, "op2", now_ms=NOW, reason="lost"), "removes `op2`"),
        "manifest": (change.revoke_manifest(TWO, "0" * 64, now_ms=NOW, reason="x"), "revokes manifest 0000"),
        "serials": (change.revoke_serials(TWO, "a", 5, now_ms=NOW, reason="x"), "revokes serials of agent `a` up to 5"),
        "renew": (change.renew(TWO, expires_at=TWO.expires_at + 1), "changes `op1`"),
    }
    for name, (step, says) in made.items():
        assert step.document.version == 2, name
        assert step.envelope.signatures == (), name
        assert _lines(TWO, step)[0].startswith(says), _lines(TWO, step)
    unchanged = document(op(1), op(2), version=2)
    assert change.describe(TWO, unchanged, str) == ("changes nothing but the version",)


def test_only_some_changes_take_signatures_away() -> None:
    three, strict = document(op(1), op(2), op(3)), document(op(1), op(2, threshold=2))
    keeps = [
        (TWO, change.add(TWO, op(3))),
        (TWO, change.renew(TWO, expires_at=TWO.expires_at + DAY)),
        (TWO, change.update(TWO, "op2", {"root": False})),
        (strict, change.update(strict, "op2", {"threshold": 1})),
    ]
    takes = [
        (TWO, change.remove(TWO, "op2")),
        (TWO, change.rotate(TWO, "op2", kit.public(3).raw.hex(), now_ms=NOW, expires_at=TWO.expires_at)),
        (TWO, change.update(TWO, "op2", {"threshold": 2})),
        (TWO, change.update(TWO, "op2", {"scope": kit.scope(agents=("c*",))})),
        (TWO, change.update(TWO, "op2", {"expires_at": NOW + DAY})),
        (TWO, change.revoke_manifest(TWO, "0" * 64, now_ms=NOW, reason="r")),
        (TWO, change.revoke_serials(TWO, "calendar", 1, now_ms=NOW, reason="r")),
        (three, change.revoke_key(three, "op3", now_ms=NOW, reason="r")),
    ]
    assert [change.takes_away(old, made.document) for old, made in keeps] == [False] * len(keeps)
    assert [change.takes_away(old, made.document) for old, made in takes] == [True] * len(takes)


def test_root_has_keys_that_hold_until_it_ends() -> None:
    """Keys that are valid when a root expires sign its successor; without any, no root could follow it."""
    end, soon = TWO.expires_at, {"expires_at": TWO.expires_at - 1}
    one = document(op(1))
    refused: list[Callable[[], object]] = [
        lambda: change.update(one, "op1", soon),
        lambda: change.rotate(one, "op1", kit.public(2).raw.hex(), now_ms=0, expires_at=end - 1),
        lambda: change.add(one, op(2, **soon), root_threshold=2),
        lambda: change.update(TWO, "op2", soon, root_threshold=2),
        lambda: change.remove(document(op(1, **soon), op(2)), "op2"),
    ]
    for step in refused:
        with pytest.raises(errors.TrustError, match="nobody could ever sign what follows it"):
            step()
    # Allowed: a key beside a lasting one may expire early; so may the last one in an emergency or if it already does.
    assert change.add(one, op(2, **soon)).document.version == 2
    assert change.revoke_key(document(op(1, **soon), op(2)), "op2", now_ms=NOW, reason="lost").document.version == 2
    assert change.add(document(op(1, **soon)), op(2, **soon)).document.version == 2


def test_name_spelled_like_another_keys_id_does_not_stand_for_it() -> None:
    decoy = document(op(1), op(3, name=ID2), op(2))
    assert change.find(decoy, ID2).public == kit.public(2).raw.hex()
    revoked = change.revoke_key(decoy, ID2, now_ms=NOW, reason="lost").document
    assert [k.keyid for k in revoked.revoked.keys] == [ID2]
    assert [k.public for k in revoked.keys] == [kit.public(n).raw.hex() for n in (1, 3)]
    # Also before that key is ever listed.
    early = change.revoke_key(document(op(1), op(3, name=ID2)), ID2, now_ms=NOW, reason="lost").document
    assert ([k.keyid for k in early.revoked.keys], len(early.keys)) == ([ID2], 2)


def test_key_is_added_once_and_no_revoked_one() -> None:
    for entry, says in ((op(3, name="op2"), "a key `op2` already"), (op(2, name="x"), "this key already, as `op2`")):
        with pytest.raises(errors.TrustError, match=says):
            change.add(TWO, entry)
    gone = change.revoke_key(TWO, "op2", now_ms=NOW, reason="lost").document
    with pytest.raises(errors.TrustError, match="was revoked and is never listed again: lost"):
        change.add(gone, op(2))
    with pytest.raises(errors.TrustError, match="was revoked and is never listed again: lost"):
        change.rotate(gone, "op1", op(2)["public"], **BOUNDS)
    for public in ("00" * 32, "01" + "00" * 31, "x", kit.public(3).raw.hex().upper()):
        with pytest.raises(errors.TrustError):
            change.add(TWO, op(3, public=public))
    assert change.add(gone, op(3)).document.version == 3


BOUNDS: dict[str, Any] = {"now_ms": NOW, "expires_at": NOW + DAY}


def test_rotation_keeps_scope_and_takes_name_unless_another_is_given() -> None:
    narrow = kit.scope(agents=("team-*",), unlimited=False)
    old = document(op(1), op(2, scope=narrow, threshold=2, root=False))
    new = change.rotate(old, "op2", kit.public(3).raw.hex(), **BOUNDS).document
    assert [k.name for k in new.keys] == ["op1", "op2"]
    assert new.keys[1].key == kit.public(3)
    assert new.keys[1].scope == old.keys[1].scope
    assert (new.keys[1].threshold, new.keys[1].root) == (2, False)
    assert (new.keys[1].not_before, new.keys[1].expires_at) == (NOW, NOW + DAY)
    assert new.revoked == old.revoked
    named = change.rotate(old, "op2", kit.public(3).raw.hex(), new_name="x", reason="stolen", **BOUNDS).document
    assert named.keys[1].name == "x"
    (entry,) = named.revoked.keys
    assert (entry.keyid, entry.name, entry.at, entry.reason) == (ID2, "op2", NOW, "stolen")
    with pytest.raises(errors.TrustError, match="lists this key already, as `op1`"):
        change.rotate(old, "op2", kit.public(1).raw.hex(), **BOUNDS)
    # The only root key can be rotated, though it cannot be removed.
    until_the_end = {**BOUNDS, "expires_at": old.expires_at}
    made = change.rotate(old, "op1", kit.public(3).raw.hex(), **until_the_end).document
    assert made.root_keys[0].key == kit.public(3)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "the last root key removed": (
        lambda: change.remove(document(op(1), op(2, root=False)), "op1"), "only key that signs the trust root"),
    "the only root key revoked": (
        lambda: change.revoke_key(document(op(1)), "op1", now_ms=NOW, reason="x"), "only key that signs"),
    "the only root key made none": (
        lambda: change.update(document(op(1), op(2, root=False)), "op1", {"root": False}), "only key that signs"),
    "too few left for the root threshold": (
        lambda: change.remove(document(op(1), op(2), threshold=2), "op2"), "root threshold of 2 could not be met by 1"),
    "too few left after a revocation": (
        lambda: change.revoke_key(document(op(1), op(2), threshold=2), "op2", now_ms=NOW, reason="x"),
        "root threshold of 2 could not be met by 1"),
    "a root threshold over the keys": (
        lambda: change.add(document(op(1)), op(2, root=False), root_threshold=2), "could not be met by 1 root keys"),
    "a root threshold that demands prevent": (
        lambda: change.update(document(op(1), op(2), op(3), threshold=3), "op3", {"threshold": 4}), "cannot be made"),
    "a threshold over the keys": (
        lambda: change.add(document(op(1)), op(2, threshold=3, root=False)), "ever meet the threshold of `op2`"),
    "a threshold over those who share a scope": (
        lambda: change.add(TWO, op(3, threshold=4, root=False)), "ever meet the threshold of `op3`"),
    "a partner taken away": (lambda: change.remove(PARTNERS, "op3"), "ever meet the threshold of `op2`"),
    "a partner taken elsewhere": (
        lambda: change.update(PARTNERS, "op3", {"scope": kit.scope(agents=("b",)), "threshold": 1}),
        "ever meet the threshold of `op2`"),
    "an unknown key removed": (lambda: change.remove(TWO, "op9"), "has no key `op9`"),
    "an unknown name revoked": (lambda: change.revoke_key(TWO, "op9", now_ms=NOW, reason="x"), "has no key `op9`"),
    "an unknown key rotated": (lambda: change.rotate(TWO, "op9", kit.public(3).raw.hex(), **BOUNDS), "has no key"),
    "nothing changed": (lambda: change.update(TWO, "op2", {"threshold": 1}), "is listed just so already"),
    "an earlier end": (lambda: change.renew(TWO, expires_at=TWO.expires_at), "would end no later"),
    "nothing changed, and the threshold that is": (
        lambda: change.update(TWO, "op2", {}, root_threshold=1), "is listed just so already"),
    "a short id revoked": (lambda: change.revoke_key(TWO, "abc", now_ms=NOW, reason="x"), "has no key `abc`"),
    "an id that is none revoked": (
        lambda: change.revoke_key(TWO, "g" * 64, now_ms=NOW, reason="x"), "has no key `ggg"),
    "no reason": (lambda: change.revoke_key(TWO, "op2", now_ms=NOW, reason=""), "cannot be made"),
    "a digest that is none": (lambda: change.revoke_manifest(TWO, "0" * 63, now_ms=NOW, reason="x"), "cannot be made"),
    "an agent id that is none": (lambda: change.revoke_serials(TWO, "a b", 1, now_ms=NOW, reason="x"), "cannot be"),
    "more patterns than a root can hold": (
        lambda: change.add(TWO, op(3, scope=kit.scope(agents=("a",) * 257))), "cannot be made"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    build, says = REFUSED[name]
    with pytest.raises(errors.TrustError, match=says):
        build()


def test_key_of_two_signers_is_removed_when_threshold_is_said() -> None:
    three = document(op(1), op(2), op(3), threshold=2)
    assert change.remove(three, "op3").document.threshold == 2
    two = document(op(1), op(2), threshold=2)
    lowered = change.remove(two, "op2", root_threshold=1)
    assert lowered.document.threshold == 1
    assert "root threshold 2 becomes 1" in _lines(two, lowered)


def test_emergency_revocation_may_leave_key_that_waits_for_partner() -> None:
    both = document(op(1, scope=kit.scope(agents=())), *(op(n, threshold=2, root=False) for n in (2, 3)))
    left = change.revoke_key(both, "op3", now_ms=NOW, reason="stolen").document
    assert change.never_counting(both) == ()
    assert change.never_counting(left) == ("op2",)
    # A key that already waits blocks no other change.
    assert change.add(left, op(4, threshold=2, root=False)).document.version == 3


def test_never_counting_looks_where_patterns_and_roles_meet() -> None:
    def waits(*scopes: Any) -> tuple[str, ...]:
        keys = [op(n, threshold=2, root=False, scope=s) for n, s in enumerate(scopes, 2)]
        return change.never_counting(document(op(1, scope=kit.scope(agents=())), *keys))

    scope = kit.scope
    assert waits(scope(agents=("a*",)), scope(agents=("ab*",))) == ()
    assert waits(scope(agents=("a*",)), scope(agents=("abc",))) == ()
    assert waits(scope(agents=("a*",)), scope(agents=("b*",))) == ("op2", "op3")
    assert waits(scope(agents=("a",)), scope(agents=("ab",))) == ("op2", "op3")
    assert waits(scope(), scope(roles=("reader",))) == ()
    assert waits(scope(roles=("writer",)), scope(roles=("reader",))) == ("op2", "op3")
    assert waits(scope(roles=("writer", "reader")), scope(agents=("x",), roles=("reader",))) == ()


def test_key_for_roots_alone_waits_for_nobody() -> None:
    for scope in (kit.scope(agents=()), kit.scope(roles=())):
        assert change.never_counting(document(op(1, threshold=2, scope=scope), op(2, threshold=2))) == ("op2",)
    assert change.never_counting(document(op(1, threshold=2), op(2, threshold=2))) == ()


def test_threshold_alone_can_be_changed() -> None:
    made = change.update(TWO, "op2", {}, root_threshold=2)
    assert made.document.threshold == 2
    assert _lines(TWO, made) == ("root threshold 1 becomes 2",)


def test_words_are_all_signed() -> None:
    narrow = kit.scope(agents=("a*", "b"), roles=("reader",), unlimited=False)
    end = TWO.expires_at
    old = document(op(1), op(2, scope=narrow, root=False, threshold=2), op(3, root=False), revoked=kit.revoked())
    new = document(
        op(1),
        op(2, scope=kit.scope(agents=()), threshold=3),
        op(4, not_before=5, expires_at=6, scope=narrow, root=False),
        op(5),
        version=2,
        not_before=1,
        expires_at=end + 1,
        threshold=2,
        revoked=kit.revoked(
            keys=[kit.revoked_key(3)],
            manifests=[{"payload_digest": "0" * 64, "at": NOW, "reason": "it leaks"}],
            serials=[{"agent_id": "hello", "serial_at_most": 7, "at": NOW, "reason": "old"}],
        ),
    )
    ids = [kit.public(n).keyid for n in range(6)]
    every = "agents *, roles *, may approve unlimited lifetimes"
    before = f"`op2` {ids[2]} (agents a* b, roles reader, counts among 2, t0 to t{end})"
    may = "may approve unlimited lifetimes, signs roots, counts among 3"
    after = f"`op2` {ids[2]} (agents none, roles *, {may}, t0 to t{end})"
    assert change.describe(old, new, lambda ms: f"t{ms}") == (
        f"removes `op3` {ids[3]} ({every}, t0 to t{end})",
        f"adds `op4` {ids[4]} (agents a* b, roles reader, t5 to t6)",
        f"adds `op5` {ids[5]} ({every}, signs roots, t0 to t{end})",
        f"changes {before} to {after}",
        "root threshold 1 becomes 2",
        "holds from t1 instead of t0",
        f"ends t{end + 1} instead of t{end}",
        f"revokes key {ids[3]} of `op3`: stolen",
        f"revokes manifest {'0' * 64}: it leaks",
        "revokes serials of agent `hello` up to 7: old",
    )
    # The description repeats no earlier revocation, and a key without a name appears without one.
    more = change.revoke_key(new, "f" * 64, now_ms=NOW, reason="x", root_threshold=None)
    assert _lines(new, more) == (f"revokes key {'f' * 64}: x",)


def _other(value: Any) -> list[Any]:
    """Return other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value + 2**20]
    return ["zz", kit.public(9).raw.hex(), "f" * 64] if isinstance(value, str) else [value[::-1], value[1:]]


def _changed(value: Any) -> Iterator[Any]:
    """Yield the document with each of its fields changed in turn, at any depth."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from ({**value, name: other} for other in _changed(part))
        return
    yield from _other(value)
    if isinstance(value, list):
        for at, part in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in _changed(part))


def test_no_difference_goes_unsaid() -> None:
    narrow = kit.scope(agents=("a", "b*"), roles=("r", "s"))
    old = document(
        op(1),
        op(2, scope=narrow),
        op(3, threshold=2, root=False),
        revoked=kit.revoked(
            keys=[kit.revoked_key(5)],
            manifests=[{"payload_digest": "0" * 64, "at": NOW, "reason": "it leaks"}],
            serials=[{"agent_id": "hello", "serial_at_most": 7, "at": NOW, "reason": "old"}],
        ),
    )
    said: list[tuple[str, ...]] = []
    for values in _changed(old.model_dump(mode="json")):
        try:
            new = RootDocument.model_validate(values)
        except ValueError:
            continue
        # A missing revocation is refused before the version is compared.
        if new.version == old.version and new != old and old.revoked.dropped_by(new.revoked) is None:
            said.append(change.describe(old, new, str))
    assert len(said) > 60
    assert ("changes nothing but the version",) not in said
    assert ("lists the keys in the order `op3` `op2` `op1`",) in said


def test_key_is_revoked_by_id_even_before_it_is_listed() -> None:
    made = change.revoke_key(document(op(1)), ID2, now_ms=NOW, reason="stolen").document
    assert made.revoked.keys[0].name is None
    with pytest.raises(errors.TrustError, match="revoked already"):
        change.revoke_key(made, ID2, now_ms=NOW, reason="again")
    by_id = change.revoke_key(TWO, ID2, now_ms=NOW, reason="lost").document
    assert by_id == change.revoke_key(TWO, "op2", now_ms=NOW, reason="lost").document
    assert [k.name for k in by_id.keys] == ["op1"]


def test_what_is_revoked_twice_is_said_and_serials_only_go_up() -> None:
    made = change.revoke_manifest(TWO, "1" * 64, now_ms=NOW, reason="x").document
    made = change.revoke_manifest(made, "0" * 64, now_ms=NOW, reason="x").document
    assert [m.payload_digest[0] for m in made.revoked.manifests] == ["0", "1"]
    with pytest.raises(errors.TrustError, match="is revoked already"):
        change.revoke_manifest(made, "1" * 64, now_ms=NOW, reason="y")
    made = change.revoke_serials(made, "b", 5, now_ms=NOW, reason="x").document
    made = change.revoke_serials(made, "a", 9, now_ms=NOW, reason="x").document
    for at_most in (4, 5):
        with pytest.raises(errors.TrustError, match="up to 5 are revoked already"):
            change.revoke_serials(made, "b", at_most, now_ms=NOW, reason="y")
    made = change.revoke_serials(made, "b", 6, now_ms=NOW, reason="y").document
    assert [(s.agent_id, s.serial_at_most, s.reason) for s in made.revoked.serials] == [("a", 9, "x"), ("b", 6, "y")]


def test_renewal_moves_root_and_keys_that_ended_with_it() -> None:
    end = TWO.expires_at
    old = document(op(1), op(2, expires_at=end - 1), expires_at=end)
    new = change.renew(old, expires_at=end + DAY).document
    assert [k.expires_at for k in new.keys] == [end + DAY, end - 1]
    assert new.expires_at == end + DAY


def test_root_that_no_reader_would_take_is_not_made() -> None:
    wide = tuple(f"{'x' * 100}{n}" for n in range(256))
    many = document(op(1), *(op(n, scope=kit.scope(agents=wide)) for n in range(2, 28)))
    with pytest.raises(errors.TrustError, match="would be larger than"):
        change.add(many, op(29, scope=kit.scope(agents=wide)))
