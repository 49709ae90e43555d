"""Compare two sets of grants domain by domain, and make the error of a difference."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from policy import errors
from policy.decompile import documents
from policy.grants.sets.domain import Domain


class Difference(Struct, frozen=True):
    """The excess and the lack of artefacts in one domain, as lines."""

    domain: str
    wider: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.wider or self.missing)

    def of(self, holder: str) -> Difference:
        """The same, each line with what holds it before it."""
        return Difference(
            self.domain,
            tuple(f"{holder}: {line}" for line in self.wider),
            tuple(f"{holder}: {line}" for line in self.missing),
        )


def between(domain: str, found: Domain, expected: Domain) -> Difference:
    """Return the excess of ``found`` over ``expected``, and its lack. Empty exactly when the two are equal."""
    wider, missing = found.difference(expected).describe(), expected.difference(found).describe()
    if found != expected and not wider and not missing:
        # A mode, or a form, for which a domain has no line.
        wider = (f"{documents.shown(found.canonical())} instead of {documents.shown(expected.canonical())}",)
    return Difference(domain, wider, missing)


def check(differences: Iterable[Difference], *, what: str, against: str, hint: str) -> None:
    """Refuse the first difference, with all of them in the error's details.

    Raises:
        errors.ProofError: there is one; ``details`` hold the first ``domain``, its lines ``wider`` and ``missing``,
            and all ``differences``.
    """
    found = tuple(difference for difference in differences if difference)
    if not found:
        return
    first = found[0]
    verb, lines = ("more", first.wider) if first.wider else ("less", first.missing)
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    raise errors.ProofError(
        f"{what} allow {verb} than {against} in {first.domain}: {documents.shown(lines[0])}{more}",
        hint=hint,
        domain=first.domain,
        wider=first.wider,
        missing=first.missing,
        differences=found,
    )
