"""Show what packages of the home may do on this machine: compiled as by a run, without a signature, and run by nothing.

It reads the package's present files with this process's rights. The same functions answer `covenant policy explain`,
`diff` and `denials`, so that the console says what they say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from covenant.runtime import packages
from covenant.runtime.agents import Agents
from policy import data, decide, errors
from policy.decide import Decision
from policy.denials import Denial
from policy.explain import diff, report
from policy.host import HostFacts
from policy.package import MANIFEST_NAME, Package
from policy.rules import nine
from policy.why import denied, sight
from sandbox import config
from sandbox.host import facts
from sandbox.storage import package_reader

# A manifest that is longer is no manifest that a person reads before signing.
MOST_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Compiled:
    package: Package
    decision: Decision
    host: HostFacts
    never: Mapping[str, str]


class AgentView:
    """The packages of one home. Every method blocks: it reads files and compiles."""

    def __init__(self, agents: Agents, *, home: Path, state: Path) -> None:
        self._agents, self._home, self._state = agents, home, state

    def answer(self, kind: str, fields: Mapping[str, str]) -> dict[str, Any]:
        """Return the document that answers one of ``agent_rules``, ``explain_denial`` and ``compare_manifest``.

        Raises:
            errors.CovenantError: as the method of the kind.
        """
        if kind == "agent_rules":
            return self.rules(fields["agent_id"])
        if kind == "compare_manifest":
            return self.compared(fields["agent_id"], fields["manifest"])
        return self.explained(fields["agent_id"], Denial(fields["layer"], fields["target"], fields["code"]))

    def rules(self, agent_id: str) -> dict[str, Any]:
        """Return each rule of the artefacts, with the line of the manifest that caused it.

        Raises:
            errors.CovenantError: there is no such agent, or it cannot be compiled here.
        """
        found = self._compiled(self._package(agent_id))
        decision = found.decision
        rows = report.explain(decision.artefacts, where=decision.manifest.where)
        return {
            "kind": "agent_rules",
            "agent_id": agent_id,
            "policy_digest": decision.artefacts.digest,
            "rules": [row.document() for row in rows],
            "refusals": [one.to_json() for one in decision.refusals],
            "manifest": found.package.files[MANIFEST_NAME].decode("utf-8", "replace"),
        }

    def explained(self, agent_id: str, denial: Denial) -> dict[str, Any]:
        """Return the meaning of a denial; with the lines to add, where the agent's package is in this home."""
        known = {"kind": "denial_explained", **denied.words(denial), "meaning": denied.meaning(denial)}
        try:
            found = self._compiled(self._package(agent_id))
            decision = found.decision
            seen = sight.of(
                *(decision.artefacts, decision.manifest),
                files=found.package.files,
                host=found.host,
                never=found.never,
            )
            return _on_this_host({**known, **denied.explain(denial, seen).document()})
        except errors.CovenantError as e:
            return {**known, "note": str(e)}

    def compared(self, agent_id: str, manifest: str) -> dict[str, Any]:
        """Compile the agent's package with another manifest, and compare what the two allow.

        Raises:
            errors.CovenantError: there is no such agent, or one of the two cannot be compiled here.
        """
        if len(raw := manifest.encode("utf-8", "surrogatepass")) > MOST_BYTES:
            raise errors.UsageError(f"a manifest of {len(raw)} bytes is longer than {MOST_BYTES}")
        package = self._package(agent_id)
        old = self._compiled(package).decision
        new = self._compiled(package.with_manifest(raw)).decision
        found = diff.compare_artefacts(old.artefacts, new.artefacts)
        return {
            "kind": "manifests_compared",
            "summary": found.summary(),
            **found.document(),
            "refusals": [one.to_json() for one in new.refusals],
        }

    def _package(self, agent_id: str) -> Package:
        with packages.opened(self._agents.find(agent_id)) as directory:
            return package_reader.read(directory)

    def _readable(self) -> Path:
        """Return the state whose configuration is read. Root's own is closed to the daemon: then defaults hold."""
        closed = os.path.lexists(self._state) and not os.access(self._state, os.R_OK | os.X_OK)
        return self._home / "supervisor" if closed else self._state

    def _compiled(self, package: Package) -> _Compiled:
        manifest = decide.manifest_of(package)
        if manifest.sandbox.backend != "linux-gvisor":
            raise errors.BackendError(
                f"backend `{manifest.sandbox.backend}` compiles to no sandbox, there is nothing to show",
                hint='write backend = "linux-gvisor" in [sandbox]',
            )
        settings = config.load(self._readable())
        own = (str(self._home), os.path.abspath(self._state))
        host = facts.for_manifest(
            *(facts.probe(settings), manifest),
            config=settings,
            package=package.files,
            extra_never=own,
            effective=nine.requested(manifest, roles=data.roles()),
        )
        never = facts.never_granted(settings, own)
        decision = decide.compile_unsigned(package, manifest, host=host, extra_never=never)
        return _Compiled(package, decision, host, never)


def _on_this_host(one: dict[str, Any]) -> dict[str, Any]:
    """Take the lines of a path back that this host has not: a run with them would be refused."""
    if (
        one["layer"] == "path"
        and one["code"] == "not_granted"
        and one.get("add")
        and not os.path.lexists(one["target"])
    ):
        return {**one, "add": [], "note": "this host has no such path either: make it there, and grant it"}
    return one
