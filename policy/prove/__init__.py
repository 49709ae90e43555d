"""Translation validation: the compiled artefacts are read back into grants and shown to be the effective grants.

    (1) every artefact that something enforces is read back      policy.decompile.read
    (2) domain by domain, what was found is what was granted     nothing wider, nothing missing
    (3) system calls pass with the arguments that the table of argument rules allows, and no others
    (4) each holder of ceilings holds them alone                 cgroup v2, cgroup v1, the OCI configuration
    (5) effective.json and provenance.json, which people read, say the same
    (6) what is started and shown is the package's and the host's, where these facts are at hand

Where an enforcer is coarser than a grant, the grant is rounded by one of ``ROUNDINGS`` before it is compared; there
is no other tolerance. The compilers are not trusted for any of it: nothing here or in policy.decompile is shared with
them but data tables and the grants themselves (docs/adr/0019-translation-validation.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from policy.compile.artefacts import Artefacts
from policy.decompile import calls
from policy.decompile import read as reading
from policy.decompile.read import Decompiled
from policy.grants.effective import Effective
from policy.prove import differences, facts, granted_calls, roundings, told
from policy.prove.differences import Difference
from policy.prove.facts import Facts
from policy.prove.roundings import ROUNDINGS
from policy.prove.subset import within, within_sums

__all__ = ["ROUNDINGS", "Difference", "Facts", "Proof", "prove", "within", "within_sums"]

_HINT = "the compiler and the reader disagree: this is a fault of the program, nothing was started"


@dataclass(frozen=True, slots=True)
class Proof:
    """That the artefacts are the grants. ``roundings`` holds, by domain, the ids of those that were made use of."""

    found: Decompiled
    roundings: Mapping[str, tuple[str, ...]]

    def lines(self) -> tuple[str, ...]:
        """A line a domain: what was compared, and what was rounded."""
        counts = {name: len(domain.describe()) for name, domain in self.found.grants.domains()}
        return tuple(
            f"{name}: equal, {count} {'grant' if count == 1 else 'grants'}"
            + "".join(f"; {ROUNDINGS[one].holds}" for one in self.roundings[name])
            for name, count in counts.items()
        )

    def document(self) -> dict[str, Any]:
        """As ``policy prove --json`` prints it."""
        return {
            "equal": True,
            "domains": {
                name: {"grants": list(domain.describe()), "roundings": list(self.roundings[name])}
                for name, domain in self.found.grants.domains()
            },
        }


def prove(effective: Effective, artefacts: Artefacts, *, known: Facts | None = None) -> Proof:
    """Show that the artefacts allow exactly the effective grants, up to ``ROUNDINGS``.

    ``known`` is what the compiler was told beside the grants; without it (6) is left out.

    Raises:
        errors.ProofError: they allow more or less; ``details`` hold the first ``domain``, its lines ``wider`` and
            ``missing``, and all ``differences``.
        errors.ArtefactError: they cannot be read back, or contradict each other.
    """
    # (1)
    found = reading.read(artefacts.files)
    # (2), (3), (4)
    expected = roundings.expected(effective, found)
    differences.check(_differences(effective, found, expected), what="the artefacts", against="the grants", hint=_HINT)
    # (5)
    package_digest = told.check(artefacts.files, effective, found)
    # (6)
    if known is not None:
        facts.check(known, found, package_digest)
    return Proof(found, {name: used for name, (_, used) in expected.items()})


def _differences(
    effective: Effective, found: Decompiled, expected: Mapping[str, roundings.Expected]
) -> Iterator[Difference]:
    for name, mine in found.grants.domains():
        yield differences.between(name, mine, expected[name][0])
    yield _arguments(effective, found, expected["syscalls"][0].names)
    for holder, held in found.limits:
        wanted = roundings.of_holder(holder, expected["resources"][0])
        yield differences.between("resources", held, wanted).of(holder)


def _arguments(effective: Effective, found: Decompiled, names: frozenset[str]) -> Difference:
    """(3) The filter lets pass what the table says for the granted names."""
    wanted = granted_calls.table(names, network=effective.linked)
    odd = tuple(calls.differences(found.calls, wanted))
    says = {one: one.describe("the filter", "the grants") for one in odd}
    wider = tuple(text for one, text in says.items() if one.here == "allowed")
    return Difference("syscalls", wider, tuple(text for one, text in says.items() if one.here != "allowed"))
