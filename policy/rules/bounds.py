"""Rules 3 and 4: the grants are within a role's ceiling, and within what the parent has."""

from __future__ import annotations

from policy import errors
from policy.grants.effective import Effective
from policy.manifest import text
from policy.rules import items
from policy.rules.case import Case

_SHOWN = 6  # how many grants of the ceiling a hint lists
_NO_ROLE = "no role allows all of it: leave `role` out, or take the grant out"
_PARENT = "grant it to the parent too, or take it out"


def role_subset(case: Case) -> None:
    """(3) If a role is named: subset of its ceiling, or equal.

    Raises:
        errors.RoleViolation: the role is not known, or its ceiling lacks a grant.
    """
    name = case.manifest.agent.role
    if name is None:
        return
    if name not in case.roles.by_name:
        near = text.nearest(name, tuple(case.roles.by_name))
        hint = f"did you mean `{near}`?" if near else f"known roles: {', '.join(case.roles.by_name)}"
        raise errors.RoleViolation(
            f"role {text.quote(name)} is not known", grant="agent.role", hint=hint, where=case.where("agent.role")
        )
    over = _beyond(case, name)
    if over:
        wide = [one for one in case.roles.by_name if not _beyond(case, one)]
        other = f"name a role that allows all of it ({', '.join(wide)}), or leave `role` out" if wide else _NO_ROLE
        _refuse(case, errors.RoleViolation, over, f"role `{name}`", case.roles.ceiling(name), mend=other)


def _beyond(case: Case, role: str) -> tuple[items.Excess, ...]:
    """Return the grants that the ceiling of a role lacks."""
    return items.excess(case.manifest, case.requested, case.roles.ceiling(role))


def parent_intersection(case: Case) -> None:
    """(4) Effective is the meet of the parent's effective grants and the child's; the excess is refused unless the
    spawn request asked to be narrowed.

    Raises:
        errors.ParentViolation: another parent than the statement names, one without time left, or less than is asked;
            or the child asks for a workspace, or for a way around the gate that reads its parent's requests.
    """
    statement, parent, outcome = case.statement, case.parent, case.delegation
    pinned = None if statement is None else statement.parent_digest
    if pinned is not None and (parent is None or pinned != parent.payload_digest):
        who = "no parent" if parent is None else f"agent `{parent.agent_id}`"
        raise errors.ParentViolation(
            f"the package was signed for one parent and is started by {who}", hint="only that parent may start it"
        )
    if parent is not None and parent.remaining_seconds is not None and parent.remaining_seconds <= 0:
        raise errors.ParentViolation(f"agent `{parent.agent_id}` has no time left", grant="lifetime")
    if parent is not None and case.manifest.workspace.mode is not None:
        raise errors.ParentViolation(
            f"a child of agent `{parent.agent_id}` asks for a workspace, and has no caller whose directory it could be",
            grant="workspace.mode",
            hint="take [workspace] out, or have the parent pass the files on",
            where=case.where("workspace.mode"),
        )
    if parent is not None and outcome is not None and outcome.removed and case.on_excess != "narrow":
        over, who = items.excess(case.manifest, case.requested, parent.ceiling), f"parent `{parent.agent_id}`"
        _refuse(case, errors.ParentViolation, over, who, parent.ceiling, mend=_PARENT, domains=outcome.report())
    _check_read_hosts(case)


def _check_read_hosts(case: Case) -> None:
    """Refuse a child that reaches a host by TLS unread, whose parent's requests to it are read and judged."""
    if case.parent is None:
        return
    for host in sorted(case.parent.effective.inject.hosts - case.effective.inject.hosts):
        if case.effective.network.to_name(host).tls:
            raise errors.ParentViolation(
                f"requests to {host} of agent `{case.parent.agent_id}` are read, and the child's are not",
                grant="permissions.network",
                hint=f"write inject for {host}, or take the host out",
                where=case.where("permissions.network"),
            )


def _refuse(
    case: Case,
    kind: type[errors.RuleViolation],
    over: tuple[items.Excess, ...],
    bound: str,
    ceiling: Effective,
    *,
    mend: str,
    **details: object,
) -> None:
    """Raise for the first excess; the hint says what the bound allows there and ``mend``, ``details`` list them all."""
    first = over[0]
    allowed = getattr(ceiling, first.domain).describe()
    shown = ", ".join(text.visible(line) for line in allowed[:_SHOWN]) + (", ..." if len(allowed) > _SHOWN else "")
    rows = [{"domain": one.domain, "grant": one.grant, "lines": list(one.lines)} for one in over]
    raise kind(
        f"{text.quote('; '.join(first.lines))} is not within {bound}",
        grant=first.grant,
        hint=f"it allows in {first.domain}: {shown or 'nothing'}; {mend}",
        where=case.where(first.grant),
        excess=rows,
        **details,
    )
