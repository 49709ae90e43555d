"""Check a package for a client that runs it elsewhere, at the API of Hermes.

The client has at best a copy of the trust root. This state holds the root that is in force, its revocations, the
highest accepted serial and the greatest time ever seen.
"""

from __future__ import annotations

from policy import decide
from policy.package import MANIFEST_NAME
from policy.signing import trust
from sandbox.serve.api import protocol, run
from sandbox.serve.api.session import Session


def check_package(session: Session, asked: protocol.CheckPackage) -> None:
    """Verify it as for a run, and answer whose it is. Bounded as a run's package is, for root as well: nothing follows.

    Raises:
        errors.CovenantError: it cannot be read, or no operator's signature holds for it here.
    """
    directory = session.directory(0)
    with session.opened() as own:
        trusted = run.verified(session, own, directory)
    run.check_seen(trusted.package, asked.manifest_sha256)
    manifest = decide.manifest_of(trusted.package)
    agent = manifest.agent
    signers = trust.authorise(trusted, agent_id=agent.id, role=agent.role, operator=agent.operator)
    session.answer(
        {
            "kind": "checked",
            "agent_id": agent.id,
            "role": agent.role,
            "signers": [one.name for one in signers],
            "serial": trusted.statement.serial,
            "trust_root": trusted.root_version,
            "manifest_sha256": trusted.package.digests[MANIFEST_NAME],
            "package_digest": trusted.package.digest,
        }
    )
