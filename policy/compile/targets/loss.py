"""The loss report: the parts of a manifest that a target other than linux-gvisor loses, and their acceptance.

    lost grant         the agent can do less than it was granted; listed
    lost restriction   the target would allow more; refused, unless the operator names it

The rows are data (policy/data/targets.toml); here are the tests that tell whether a row concerns a manifest. Only what
concerns it is reported, and only what is reported can be accepted: there is no blanket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import Struct, structs

from policy import data, errors
from policy.data import target_table
from policy.data.target_table import ALWAYS, LOST, Target, TargetRow
from policy.grants.effective import DOMAINS, Effective
from policy.grants.sets import addresses, spans
from policy.manifest import text
from policy.manifest.agent import Manifest

RESTRICTION = "lost-restriction"
_SHOWN = 16  # how many details a loss lists


class Loss(Struct, frozen=True):
    """One loss of one manifest. ``details`` are the grants that it concerns, for people."""

    id: str
    field: str
    kind: str
    says: str
    details: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As it stands in loss.json."""
        return {"id": self.id, "field": self.field, "kind": self.kind, "says": self.says, "details": list(self.details)}


# None: the row does not concern this manifest; else what it concerns, which may be nothing in particular.
Found = tuple[str, ...] | None
Test = Callable[[Effective, Manifest, TargetRow], Found]


def value(effective: Effective, manifest: Manifest, field: str) -> Any:
    """Return the value of a row's field: of the effective grants, or of the manifest for a field without a domain."""
    section, name = field.split(".")
    if section in DOMAINS:
        # Some are left out where nothing is granted.
        return getattr(effective, section).canonical().get(name)
    return getattr(getattr(manifest, section), name)


def deadline_ms(effective: Effective) -> int:
    """How long a run may last: the earlier of cpu_ms_per_task and the lifetime. Milliseconds.

    Raises:
        errors.NotEnforceableError: neither ends.
    """
    ttl = effective.lifetime.ttl_seconds
    ends = [end for end in (effective.resources.cpu_ms_per_task, ttl * 1000 if ttl else None) if end is not None]
    if not ends:
        raise errors.NotEnforceableError("resources.cpu_ms_per_task has no limit", hint="write it")
    return min(ends)


def _granted(effective: Effective, manifest: Manifest, row: TargetRow) -> Found:
    """The field is more than nothing."""
    found = value(effective, manifest, row.field)
    if not found:
        return None
    listed = found if isinstance(found, list | tuple) else (found,)
    return tuple(_words(one) for one in listed)


def _given_network(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    return tuple(map(str, effective.may_grant.network.entries)) or None


def _words(one: Any) -> str:
    if isinstance(one, Mapping):  # an executable
        return f"{one['path']} sha256:{one['sha256']}" if one["sha256"] else str(one["path"])
    return str(one).lower() if isinstance(one, bool) else str(one)


def _pinned(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    return tuple(str(one) for one in effective.executables if one.sha256) or None


def _not_terminate(effective: Effective, manifest: Manifest, row: TargetRow) -> Found:
    found = value(effective, manifest, row.field)
    return None if found == "terminate" else (found,)


def _under_a_second(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    ends = deadline_ms(effective)
    return (f"{ends} ms",) if ends < 1000 else None


def _cpu_time_binds(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    """Return whether cpu_time_ms is below the quota within the deadline, which no target cuts below 1 s."""
    limit, quota = effective.resources.cpu_time_ms, effective.resources.cpu_millis
    if limit is None or (quota is not None and limit * 1000 >= quota * max(1000, deadline_ms(effective))):
        return None
    return (f"{limit} ms",)


def _network(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    return None if effective.network.mode == "off" else tuple(map(str, effective.network.entries))


def _names(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    return tuple(pattern for pattern, _ in effective.network.names) or None


def _addresses(effective: Effective, *protocols: str) -> Found:
    """Address entries by one of these protocols."""
    names = {pattern for pattern, _ in effective.network.names}
    entries = (e for e in effective.network.entries if e.host not in names and e.protocol in protocols)
    return tuple(map(str, entries)) or None


def _tls_addresses(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    return _addresses(effective, "tls")


def _port_addresses(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    """Addresses of which not every port is granted by TCP and by UDP."""
    every = ((1, 65535),)
    cut = [(a, b) for a, b, how in effective.network.reach if how.tcp != every or how.udp != every]
    return tuple(str(block) for a, b in cut[:_SHOWN] for block in list(addresses.blocks(a, b))[:_SHOWN]) or None


def private_reach(effective: Effective) -> spans.Spans:
    """The granted addresses that no name leads to."""
    granted = spans.join((first, last) for first, last, _ in effective.network.reach)
    return spans.minus(granted, addresses.PUBLIC)


def _names_beside_private(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    if not effective.network.names:
        return None
    private = private_reach(effective)
    return tuple(str(block) for a, b in private for block in addresses.blocks(a, b)) or None


def _implicit_calls(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    return tuple(sorted(target_table.implicit_calls() - effective.syscalls.names)) or None


# Calls whose rule over arguments another setting of systemd holds: RestrictNamespaces=, LockPersonality=, and the empty
# capability sets, without which no device node is made.
_HELD_CALLS = frozenset({"clone", "personality", "mknod", "mknodat"})


def _ruled_calls(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    ruled = frozenset(data.arguments().rules) - _HELD_CALLS
    return tuple(sorted(ruled & (effective.syscalls.names | target_table.implicit_calls()))) or None


def _python(_: Effective, manifest: Manifest, __: TargetRow) -> Found:
    return () if manifest.agent.runtime == "python3" else None


def _injected(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    return effective.inject.describe() or None


def _asked_requests(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    return structs.replace(effective.inject, rules=()).describe() or None


def _asked(effective: Effective, _: Manifest, __: TargetRow) -> Found:
    return tuple(map(str, effective.network.asked_entries)) or None


TESTS: Mapping[str, Test] = {
    ALWAYS: lambda _, __, ___: (),
    "granted": _granted,
    "given_network": _given_network,
    "pinned": _pinned,
    "not_terminate": _not_terminate,
    "under_a_second": _under_a_second,
    "cpu_time_binds": _cpu_time_binds,
    "network": _network,
    "names": _names,
    "tls_addresses": _tls_addresses,
    "port_addresses": _port_addresses,
    "names_beside_private": _names_beside_private,
    "implicit_calls": _implicit_calls,
    "ruled_calls": _ruled_calls,
    "python": _python,
    "injected": _injected,
    "asked": _asked,
    "asked_requests": _asked_requests,
}


def report(target: Target, effective: Effective, manifest: Manifest) -> tuple[Loss, ...]:
    """Every loss of this manifest on ``target``, in the order of the table."""
    out = []
    for row in target.rows:
        if row.how not in LOST:
            continue
        found = TESTS[row.when](effective, manifest, row)
        if found is not None:
            details = tuple(text.visible(one) for one in found[:_SHOWN])
            more = (f"and {len(found) - _SHOWN} more",) if len(found) > _SHOWN else ()
            out.append(Loss(f"{target.name}.{row.id}", row.field, row.how, row.says, (*details, *more)))
    return tuple(out)


def accept(target: Target, losses: tuple[Loss, ...], accepted: Collection[str]) -> tuple[str, ...]:
    """The lost restrictions that the operator accepted, sorted: all that there are, and nothing else.

    Raises:
        errors.UsageError: an id was accepted that this manifest does not lose on this target.
        errors.LossError: a restriction is lost and was not accepted.
    """
    lost = {loss.id: loss for loss in losses if loss.kind == RESTRICTION}
    for one in sorted(set(accepted) - set(lost)):
        raise errors.UsageError(
            f"{text.quote(one)} is no restriction that `{target.name}` loses of this manifest",
            hint=f"accept only what is lost: {' '.join(sorted(lost)) or 'nothing'}",
        )
    refused = [loss for one, loss in lost.items() if one not in accepted]
    if refused:
        many = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise errors.LossError(
            f"`{target.name}` does not hold `{refused[0].field}`: {refused[0].says}{many}",
            hint=" ".join(f"--accept-loss {loss.id}" for loss in refused),
            losses=[loss.document() for loss in losses],
        )
    return tuple(sorted(lost))


def document(target: Target, losses: tuple[Loss, ...], accepted: Collection[str]) -> dict[str, Any]:
    """loss.json: what is lost, what was accepted, and what the output depends on."""
    return {
        "version": 1,
        "target": target.name,
        "accepted": sorted(accepted),
        "lost_restrictions": [loss.document() for loss in losses if loss.kind == RESTRICTION],
        "lost_grants": [loss.document() for loss in losses if loss.kind != RESTRICTION],
        "requires": list(target.requires),
    }
