"""Attest runs that other processes supervise, for ``covenant attest``.

    (1) the run's directory says what was made for it, and holds its artefacts; only root can have written it
    (2) the artefacts are those whose digest the log's row of the start has           the signed log is what is trusted
    (3) they are what the manifest in the package's copy grants, and the copy is what was signed     policy.prove.prove
        of a child: what its parent left of that, and within what its parent runs under              policy.prove.within
    (4) the kernel holds no more than they allow                                      sandbox.attest.verifier.examine

The directory only says where to look. A change of its artefacts would also need a change of the log, which is verified
before, and of the copy, whose digest the artefacts contain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from policy import data, decide, errors, prove
from policy.compile.artefacts import Artefacts
from policy.grants import restore
from policy.lifecycle import State
from policy.prove.live import Layer, Standing
from policy.rules import nine
from sandbox.attest import network, reference, verifier
from sandbox.rundir import directory as rundir_directory
from sandbox.rundir import label, registry
from sandbox.storage import artefact_reader, package_reader

# A run that is starting or ending is examined again for this long before it is reported as absent or as drifted.
PATIENCE_SECONDS, AGAIN_SECONDS = 5.0, 0.1
_DIGESTS = "policy"


class RunAttestation(Struct, frozen=True):
    """Attestation of one run. ``domains`` are the lines of the proof of its artefacts, one line for each domain."""

    run_id: str
    agent_id: str
    policy_digest: str
    layers: tuple[Layer, ...]
    domains: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the kernel holds this agent within its manifest."""
        return bool(self.layers) and all(layer.holds for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Return the element of ``runs`` that ``covenant attest --json`` prints for this run."""
        return {
            "run_id": self.run_id,
            "agent_id": self.agent_id,
            "policy_digest": self.policy_digest,
            "holds": self.holds,
            "layers": [
                {"layer": one.name, "standing": one.standing, "expected": one.expected, "found": one.found}
                for one in self.layers
            ],
            "domains": list(self.domains),
        }


def live(runs: Path) -> list[str]:
    """Return the ids of the runs of agents that have begun and not ended. Self-tests are left out."""
    if not runs.is_dir():
        return []
    begun = (path for path in runs.iterdir() if (path / reference.RECORD).is_file())
    return sorted(path.name for path in begun if not label.LIKE_NO_RUN & (label.label_of(path) or {}).keys())


def waiting(runs: Path) -> list[registry.Entry]:
    """Return the standby instances without an intent. The log has no row of their start, which (2) needs."""
    return [one for one in registry.live(runs) if label.STANDBY in one.label and not one.self_test]


def answer(state: Path, run_id: str, started: Mapping[str, str]) -> RunAttestation | None:
    """Attest one run by steps (1) to (4). Returns None if the run ended meanwhile.

    ``started`` maps run ids to the policy digests in their start rows of the verified log.

    Raises:
        errors.ArtefactError, errors.ProofError: Raised when (2) or (3) fails: a fault, or the directory was changed.
    """
    directory, known = state / "runs" / run_id, verifier.VerifierCache()
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            # (1)
            made = reference.ReferenceValues.read(directory)
            if made is None:
                return None
            artefacts = artefact_reader.read(directory / rundir_directory.POLICY)
        except (OSError, errors.ArtefactError):
            if _is_there(directory):
                raise
            return None
        # (2), (3)
        beside, domains = _trusted(made, artefacts, started)
        # (4)
        begins = _begins(directory)
        report = verifier.examine(made, artefacts, known, state=state)
        # A run that is being made is not within its manifest yet. Its agent has no intent.
        if not report.gone and (report.holds or not begins or time.monotonic() > until):
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                beside += () if made.network is None else (*network.second_opinion(made.network),)
            return RunAttestation(run_id, made.agent_id, made.policy_digest, (*beside, *report.layers), domains)
        if not _is_there(directory):
            return None
        if report.gone and time.monotonic() > until:
            absent = Layer("process", Standing.WIDER, "a gofer and a sandbox", "they are not there")
            return RunAttestation(run_id, made.agent_id, made.policy_digest, (*beside, absent), domains)
        known = verifier.VerifierCache()
        time.sleep(AGAIN_SECONDS)


def _begins(directory: Path) -> bool:
    """Whether the run is just being made, or its agent waits for its intent."""
    with contextlib.suppress(OSError):
        return (directory / registry.STATE).read_text().strip() == State.ISOLATED
    return False


def _is_there(directory: Path) -> bool:
    """Whether the run has not ended; its directory may stay a moment longer (directory.RunDirectory.vacate)."""
    return (directory / reference.RECORD).exists()


def _trusted(
    made: reference.ReferenceValues, artefacts: Artefacts, started: Mapping[str, str]
) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    digest, logged = artefacts.digest, started.get(made.run_id)
    if logged is None:
        return (Layer(_DIGESTS, Standing.UNREADABLE, "a row of its start in the log", "there is none"),), ()
    if digest != logged:
        return (Layer(_DIGESTS, Standing.WIDER, f"policy {logged}, by the log", f"policy {digest}"),), ()
    try:
        lines = tuple(_proof(made, artefacts, started))
    except (errors.ProofError, errors.PackageError, errors.ManifestError) as e:
        return (Layer(_DIGESTS, Standing.WIDER, "the grants of the package's manifest", e.message),), ()
    return (Layer(_DIGESTS, Standing.EQUAL),), lines


def _proof(made: reference.ReferenceValues, artefacts: Artefacts, started: Mapping[str, str]) -> Iterator[str]:
    """(3) Prove the artefacts by the manifest of the running copy, whose digest the artefacts name."""
    copy = package_reader.read(Path(made.package))
    manifest = decide.manifest_of(copy)
    granted = nine.requested(manifest, roles=data.roles())
    directory = Path(made.directory)
    above = (label.label_of(directory) or {}).get("parent", "")
    if not above:
        yield from prove.prove(granted, artefacts).lines()
        return
    left = restore.effective(artefacts.json("effective.json")["grants"])
    if not left.is_subset(granted):
        raise errors.ProofError("a child has what its own manifest does not grant")
    yield from prove.prove(left, artefacts).lines()
    place = directory.parent / above / rundir_directory.POLICY
    # A parent that has ended has no live policy to compare with; the log has its digest.
    with contextlib.suppress(FileNotFoundError):
        over = artefact_reader.read(place)
        if over.digest != started.get(above):
            raise errors.ProofError("the parent's policy is not the one in the log")
        prove.within(artefacts, over, remaining_seconds=None)
