"""The nine rules, but for rule 2, which is in policy.errors.signatures."""

from __future__ import annotations

from typing import Any, ClassVar

from policy.errors.operator import OperatorError


class RuleViolation(OperatorError):
    """One of the nine validation rules refused the manifest (seeds/octantos-capability-manifests.txt)."""

    rule: ClassVar[int] = 0

    def __init__(self, message: str, *, grant: str = "", hint: str = "", where: str = "", **details: Any) -> None:
        super().__init__(message, hint=hint, where=where, **details)
        self.grant = grant


class SchemaViolation(RuleViolation):
    """Rule 1: a structural constraint across sections is broken."""

    code = "rule_1_schema"
    rule = 1


class NeverGrantableError(SchemaViolation):
    """Rule 1: no manifest may have this path, with any signature (policy/data/never_grantable.toml)."""

    code = "never_grantable"


class RoleViolation(RuleViolation):
    """Rule 3: the grants are not within the role's ceiling."""

    code = "rule_3_role"
    rule = 3


class ParentViolation(RuleViolation):
    """Rule 4: the grants are not within the parent's effective grants."""

    code = "rule_4_parent"
    rule = 4

    def to_json(self) -> dict[str, Any]:
        """The error document, with what was requested, granted and removed in ``domains``; empty for other causes."""
        return {**super().to_json(), "domains": dict(self.details.get("domains", {}))}


class SpawnBudgetViolation(RuleViolation):
    """Rule 5: the spawn depth or the number of live descendants would exceed its limit."""

    code = "rule_5_spawn_budget"
    rule = 5


class ResourceViolation(RuleViolation):
    """Rule 6: the host has less than the manifest asks for."""

    code = "rule_6_resources"
    rule = 6


class DenyListViolation(RuleViolation):
    """Rule 7: the allow set contains a permanently denied system call."""

    code = "rule_7_deny_list"
    rule = 7


class IdentityViolation(RuleViolation):
    """Rule 8: the agent id already belongs to another package."""

    code = "rule_8_identity"
    rule = 8


class LifetimeViolation(RuleViolation):
    """Rule 9: an unlimited lifetime without an explicit operator approval."""

    code = "rule_9_lifetime"
    rule = 9
