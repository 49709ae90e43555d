"""Changes of a trust root, each one version on: the requests, the refusals, and the changes in words.

Nothing is weakened along the way. A change that would leave no key to sign the next version, or a threshold that no
set of keys can meet, is refused with the request to make instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from policy import errors
from policy.signing import envelope as envelopes
from policy.signing import proposal, revocation, threshold
from policy.signing.proposal import Proposal
from policy.signing.root import OperatorKey, RootDocument

_ALREADY = "nothing is left to do; covenant trust enforce ends live runs that depend on it"

__all__ = [
    "add",
    "describe",
    "find",
    "never_counting",
    "remove",
    "renew",
    "revoke_key",
    "revoke_manifest",
    "revoke_serials",
    "rotate",
    "update",
]


def add(present: RootDocument, entry: Mapping[str, Any], *, root_threshold: int | None = None) -> Proposal:
    """One key more, with the fields of ``OperatorKey``.

    Raises:
        errors.TrustError: the key or its name is listed, the key is revoked, or its threshold cannot be met.
    """
    for key in present.keys:
        if key.name == entry["name"] and key.public != entry["public"]:
            raise errors.TrustError(
                f"the trust root has a key `{key.name}` already, which is another one",
                hint=f"give another name: covenant trust add NAME --public {entry['public']}",
            )
        if key.name == entry["name"]:
            raise errors.TrustError(f"the trust root has a key `{key.name}` already", hint=_listed_hint(key))
    _refuse_listed(present, entry["public"])
    _refuse_revoked(present, entry["public"])
    return _strict(present, keys=[*_keys(present), dict(entry)], threshold=root_threshold)


def update(
    present: RootDocument, name: str, changes: Mapping[str, Any], *, root_threshold: int | None = None
) -> Proposal:
    """The key of this name or id with other fields: scope, thresholds, validity, whether it signs roots.

    Raises:
        errors.TrustError: it is not listed, nothing changes, or those who are left could not go on.
    """
    old = find(present, name)
    new = {**old.model_dump(), **changes, "name": old.name, "public": old.public}
    if new == old.model_dump() and root_threshold in (None, present.threshold):
        raise errors.TrustError(f"the key `{old.name}` is listed just so already")
    if not new["root"]:
        _refuse_last(present, old)
    keys = [new if k["public"] == old.public else k for k in _keys(present)]
    return _strict(present, keys=keys, threshold=root_threshold)


def remove(present: RootDocument, name: str, *, root_threshold: int | None = None) -> Proposal:
    """Without the key of this name or id. It is not revoked: it may be listed again.

    Raises:
        errors.TrustError: it is not listed, or those who are left could not go on.
    """
    out = find(present, name)
    left = [k for k in _keys(present) if k["public"] != out.public]
    _refuse_last(present, out)
    return _strict(present, keys=left, threshold=root_threshold)


def rotate(
    present: RootDocument,
    name: str,
    public: str,
    *,
    now_ms: int,
    expires_at: int,
    new_name: str | None = None,
    reason: str | None = None,
) -> Proposal:
    """Another key in the place of one, with its scope and thresholds; with a ``reason`` the old one is revoked.

    Raises:
        errors.TrustError: the old is not listed, or the new is listed or revoked.
    """
    out = find(present, name)
    _refuse_listed(present, public)
    _refuse_revoked(present, public)
    change = {"name": new_name or out.name, "public": public, "not_before": now_ms, "expires_at": expires_at}
    keys = [{**k, **change} if k["public"] == out.public else k for k in _keys(present)]
    revoked = present.revoked if reason is None else _with_key(present, out.key.keyid, out.name, now_ms, reason)
    return _strict(present, keys=keys, revoked=revoked)


def revoke_key(
    present: RootDocument, name: str, *, now_ms: int, reason: str, root_threshold: int | None = None
) -> Proposal:
    """Without the key of this name or id, for good. An id that is not listed can be revoked before it ever is.

    Raises:
        errors.TrustError: it is revoked already, no key has that name, or no key would be left to sign roots.
    """
    out = _named(present, name)
    if out is None and not _is_digest(name):
        raise _unknown(present, name)
    keyid = name if out is None else out.key.keyid
    if present.revoked.key(keyid) is not None:
        raise errors.TrustError(f"key {keyid} is revoked already", hint=_ALREADY)
    if out is not None:
        _refuse_last(present, out)
    left = [k for k in _keys(present) if out is None or k["public"] != out.public]
    revoked = _with_key(present, keyid, out.name if out else None, now_ms, reason)
    # What is left may be unable to sign a package, which is safe, and in an emergency must not stand in the way.
    return _next(present, keys=left, threshold=root_threshold, revoked=revoked)


def revoke_manifest(present: RootDocument, payload_digest: str, *, now_ms: int, reason: str) -> Proposal:
    """One signed statement, by the hex SHA-256 of its payload.

    Raises:
        errors.TrustError: it is revoked already, or not a digest.
    """
    if any(m.payload_digest == payload_digest for m in present.revoked.manifests):
        raise errors.TrustError(f"manifest {payload_digest} is revoked already", hint=_ALREADY)
    entry = {"payload_digest": payload_digest, "at": now_ms, "reason": reason}
    rows = [*present.revoked.model_dump()["manifests"], entry]
    return _next(present, revoked=_lists(present, manifests=sorted(rows, key=lambda row: str(row["payload_digest"]))))


def revoke_serials(present: RootDocument, agent_id: str, at_most: int, *, now_ms: int, reason: str) -> Proposal:
    """Every statement of an agent id with a serial of at most ``at_most``.

    Raises:
        errors.TrustError: as many or more are revoked already, or it is no agent id.
    """
    rows = present.revoked.model_dump()["serials"]
    for row in rows:
        if row["agent_id"] == agent_id and row["serial_at_most"] >= at_most:
            raise errors.TrustError(
                f"serials of agent `{agent_id}` up to {row['serial_at_most']} are revoked already",
                hint="a revocation is never taken back; sign the package again with a higher serial",
            )
    entry = {"agent_id": agent_id, "serial_at_most": at_most, "at": now_ms, "reason": reason}
    others = [row for row in rows if row["agent_id"] != agent_id]
    return _next(present, revoked=_lists(present, serials=sorted([*others, entry], key=lambda r: str(r["agent_id"]))))


def renew(present: RootDocument, *, expires_at: int) -> Proposal:
    """The same with another end, for the root and for every key that ended with it.

    Raises:
        errors.TrustError: it would end earlier than it does.
    """
    if expires_at <= present.expires_at:
        raise errors.TrustError("the trust root would end no later than it does", hint="give a longer --expires")
    keys = [{**k, "expires_at": expires_at} if k["expires_at"] == present.expires_at else k for k in _keys(present)]
    return _next(present, keys=keys, expires_at=expires_at)


def find(present: RootDocument, name: str) -> OperatorKey:
    """The key of this name or id.

    Raises:
        errors.TrustError: none.
    """
    found = _named(present, name)
    if found is None:
        raise _unknown(present, name)
    return found


def _named(present: RootDocument, name: str) -> OperatorKey | None:
    # A name may be spelled like an id: what looks like an id is never a name, or one key could stand for another.
    by_id = _is_digest(name)
    return next((k for k in present.keys if name == (k.key.keyid if by_id else k.name)), None)


def never_counting(document: RootDocument) -> tuple[str, ...]:
    """Return the names of keys whose demand for other signers no package can meet, with any agent and role."""
    # A pattern stands for an id that begins so and that no other names: no agent id has a star in it, and no role.
    agents = {pattern for k in document.keys for pattern in k.scope.agents}
    roles = {role for k in document.keys for role in k.scope.roles}
    counted: set[str] = set()
    for agent, role in itertools.product(agents, roles):
        covering = (k for k in document.keys if k.scope.covers_agent(agent) and k.scope.covers_role(role))
        counted.update(k.name for k in threshold.counting(covering))
    return tuple(k.name for k in document.keys if k.scope.agents and k.scope.roles and k.name not in counted)


def takes_away(old: RootDocument, new: RootDocument) -> bool:
    """Return whether a signature that counts under ``old`` may not count under ``new``.

    A further key takes nothing away (``policy.signing.threshold``), nor does one that holds for longer.
    """
    by_public = {key.public: key for key in new.keys}
    return new.revoked != old.revoked or not all(_holds_as(key, by_public.get(key.public)) for key in old.keys)


def _holds_as(old: OperatorKey, new: OperatorKey | None) -> bool:
    if new is None or new.scope != old.scope or new.threshold > old.threshold:
        return False
    return new.not_before <= old.not_before and old.expires_at <= new.expires_at


def describe(old: RootDocument, new: RootDocument, when: Callable[[int], str]) -> tuple[str, ...]:
    """Return the changes of the new version, a line each, for its signers; ``when`` formats a time."""
    lines = []
    before, after = ({k.public: k for k in d.keys} for d in (old, new))
    lines += [f"removes {_shown(k, when)}" for public, k in before.items() if public not in after]
    lines += [f"adds {_shown(k, when)}" for public, k in after.items() if public not in before]
    for public, key in after.items():
        if public in before and key != before[public]:
            lines.append(f"changes {_shown(before[public], when)} to {_shown(key, when)}")
    if [p for p in before if p in after] != [p for p in after if p in before]:
        lines.append(f"lists the keys in the order {' '.join(f'`{k.name}`' for k in new.keys)}")
    if old.threshold != new.threshold:
        lines.append(f"root threshold {old.threshold} becomes {new.threshold}")
    for name, moment in (("not_before", "holds from"), ("expires_at", "ends")):
        if getattr(old, name) != getattr(new, name):
            lines.append(f"{moment} {when(getattr(new, name))} instead of {when(getattr(old, name))}")
    lines += [
        f"revokes key {k.keyid}{f' of `{k.name}`' if k.name else ''}: {k.reason}"
        for k in _added(old.revoked.keys, new.revoked.keys)
    ]
    lines += [
        f"revokes manifest {m.payload_digest}: {m.reason}" for m in _added(old.revoked.manifests, new.revoked.manifests)
    ]
    lines += [
        f"revokes serials of agent `{s.agent_id}` up to {s.serial_at_most}: {s.reason}"
        for s in _added(old.revoked.serials, new.revoked.serials)
    ]
    return tuple(lines) or ("changes nothing but the version",)


def _added(old: Iterable[Any], new: Iterable[Any]) -> list[Any]:
    known = set(old)
    return [entry for entry in new if entry not in known]


def _shown(key: OperatorKey, when: Callable[[int], str]) -> str:
    says = [f"agents {' '.join(key.scope.agents) or 'none'}", f"roles {' '.join(key.scope.roles) or 'none'}"]
    says += ["may approve unlimited lifetimes"] if key.scope.approve_unlimited else []
    says += ["signs roots"] if key.root else []
    says += [f"counts among {key.threshold}"] if key.threshold > 1 else []
    return f"`{key.name}` {key.key.keyid} ({', '.join(says)}, {when(key.not_before)} to {when(key.expires_at)})"


def _keys(present: RootDocument) -> list[dict[str, Any]]:
    return [k.model_dump() for k in present.keys]


def _lists(present: RootDocument, **changed: list[dict[str, Any]]) -> dict[str, Any]:
    return present.revoked.model_dump() | changed


def _with_key(present: RootDocument, keyid: str, name: str | None, now_ms: int, reason: str) -> dict[str, Any]:
    entry = {"keyid": keyid, "name": name, "at": now_ms, "reason": reason}
    rows = [*present.revoked.model_dump()["keys"], entry]
    return _lists(present, keys=sorted(rows, key=lambda row: str(row["keyid"])))


def _next(
    present: RootDocument,
    *,
    keys: list[dict[str, Any]] | None = None,
    threshold: int | None = None,
    revoked: revocation.Revocations | dict[str, Any] | None = None,
    expires_at: int | None = None,
) -> Proposal:
    values = present.model_dump() | {"version": present.version + 1}
    if isinstance(revoked, revocation.Revocations):
        revoked = revoked.model_dump()
    given = {"keys": keys, "threshold": threshold, "revoked": revoked, "expires_at": expires_at}
    values |= {name: value for name, value in given.items() if value is not None}
    _refuse_root_threshold(values)
    return proposal.make(values)


def _strict(present: RootDocument, **changed: Any) -> Proposal:
    """As ``_next``, but refuse a key that could never count, and a version after which no key could sign the next."""
    made = _next(present, **changed)
    if _goes_on(present) and not _goes_on(made.document):
        raise errors.TrustError(
            "too few root keys would hold until the trust root ends, and nobody could ever sign what follows it",
            hint="let root keys end with the trust root: leave --expires out",
        )
    already = set(never_counting(present))
    for name in never_counting(made.document):
        if name not in already:
            raise errors.TrustError(
                f"no package could ever meet the threshold of `{name}`: too few keys share its agents and roles",
                hint="add the other keys first with a lower threshold, or rotate instead of removing",
            )
    return made


def _goes_on(document: RootDocument) -> bool:
    """Whether those who hold when the root ends can name what follows it."""
    return len(threshold.counting(document.root_keys_at(document.expires_at))) >= document.threshold


def _refuse_root_threshold(values: dict[str, Any]) -> None:
    signers = sum(bool(k["root"]) for k in values["keys"])
    if values["threshold"] > signers:
        raise errors.TrustError(
            f"a root threshold of {values['threshold']} could not be met by {signers} root keys",
            hint="rotate the key instead, add a root key first, or lower it with --root-threshold",
        )


def _refuse_listed(present: RootDocument, public: object) -> None:
    for key in present.keys:
        if key.public == public:
            raise errors.TrustError(f"the trust root lists this key already, as `{key.name}`", hint=_listed_hint(key))


def _listed_hint(key: OperatorKey) -> str:
    return f"covenant trust set {key.name} changes what it may sign; covenant keys new NAME makes another"


def _refuse_last(present: RootDocument, out: OperatorKey) -> None:
    if present.root_keys == (out,):
        raise errors.TrustError(
            f"`{out.name}` is the only key that signs the trust root",
            hint="rotate it, or add another root key first",
        )


def _refuse_revoked(present: RootDocument, public: str) -> None:
    if not _is_digest(public):
        return
    try:
        keyid = envelopes.public_key(bytes.fromhex(public)).keyid
    except ValueError as e:
        raise errors.TrustError(f"the public key is refused: {e}") from None
    entry = present.revoked.key(keyid)
    if entry is not None:
        raise errors.TrustError(
            f"this key was revoked and is never listed again: {entry.reason}",
            hint="make a new one: covenant keys new NAME",
        )


def _is_digest(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def _unknown(present: RootDocument, name: str) -> errors.TrustError:
    listed = ", ".join(k.name for k in present.keys)
    return errors.TrustError(f"the trust root has no key `{name}`", hint=f"it has {listed}")
