"""Lifetime grants: with its task, for so many seconds, or without an end."""

from __future__ import annotations

from typing import Any, Literal, Self

from msgspec import Struct

from policy.grants.resources import least, within
from policy.grants.sets.domain import at_most, lower

OnExpiry = Literal["terminate", "suspend"]
ON_EXPIRY: tuple[OnExpiry, ...] = ("terminate", "suspend")


class LifetimeGrant(Struct, frozen=True):
    """``ttl_seconds`` 0 ends with the task (no ``[lifetime]`` was written), None never ends.

    ``suspend`` stands above ``terminate``: a suspended agent still holds memory and can be resumed.
    """

    ttl_seconds: int | None = 0
    on_expiry: OnExpiry = "terminate"

    @classmethod
    def bottom(cls) -> Self:
        """Ends with its task."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Never ends."""
        return cls(None, "suspend")

    @property
    def unlimited(self) -> bool:
        """Whether there is no end, which needs an approval (rule 9)."""
        return self.ttl_seconds is None

    @property
    def with_task(self) -> bool:
        """Whether the run ends with its task."""
        return self.ttl_seconds == 0

    def meet(self, other: Self, /) -> Self:
        """The shorter."""
        return type(self)(least(self.ttl_seconds, other.ttl_seconds), lower(ON_EXPIRY, self.on_expiry, other.on_expiry))

    def is_subset(self, other: Self, /) -> bool:
        """Whether this ends no later."""
        return within(self.ttl_seconds, other.ttl_seconds) and at_most(ON_EXPIRY, self.on_expiry, other.on_expiry)

    def difference(self, other: Self, /) -> Self:
        """Return the part of this that ``other`` does not cover."""
        return type(self)(
            0 if within(self.ttl_seconds, other.ttl_seconds) else self.ttl_seconds,
            ON_EXPIRY[0] if at_most(ON_EXPIRY, self.on_expiry, other.on_expiry) else self.on_expiry,
        )

    def describe(self) -> tuple[str, ...]:
        """The end, when it is not the task's."""
        ttl = "lifetime not limited" if self.unlimited else f"lifetime {self.ttl_seconds} s"
        lines = () if self.with_task else (ttl,)
        return lines if self.on_expiry == ON_EXPIRY[0] else (*lines, f"on expiry {self.on_expiry}")

    def canonical(self) -> dict[str, Any]:
        """Limits by name."""
        return {
            "ttl_seconds": self.ttl_seconds,
            "unlimited": self.unlimited,
            "on_expiry": self.on_expiry,
        }
