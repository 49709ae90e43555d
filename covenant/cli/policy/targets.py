"""``covenant policy compile --target``: write files for a machine that this program does not run, and list their
losses.

The order is: decide, log the accepted losses, write. An accepted loss is in the audit log before a file with it exists.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from covenant.cli import common, times
from covenant.cli.policy import artefact_view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from policy.compile.targets.all import Output
    from policy.host import HostFacts
    from policy.manifest.agent import Manifest
    from policy.package import Package

TARGETS = ("linux-gvisor", "kubernetes", "systemd")
NATIVE = "linux-gvisor"


def compile_for(
    package: Path,
    target: str,
    *,
    out: Path,
    accepted: tuple[str, ...],
    image: str | None,
    as_json: bool,
    write: Callable[[Path, Mapping[str, bytes]], None],
) -> None:
    """Compile ``package`` for ``target`` and write the files by ``write``.

    Raises:
        errors.LossError: the target would allow more than the manifest.
        errors.UsageError: an image or an accepted loss that does not belong here.
    """
    from policy import decide
    from policy.compile.targets import all as targets_all
    from policy.rules import unsigned
    from sandbox.storage import package_reader as packages

    read = packages.read(package)
    manifest = decide.manifest_of(read)
    facts = _facts(read, manifest, target)
    order = targets_all.Order(
        effective=unsigned.check(read, manifest, facts),
        manifest=manifest,
        host=facts,
        package_digest=read.digest,
        accepted=accepted,
        image=image,
    )
    output = targets_all.compile(target, order)
    if output.accepted:
        _log_first(manifest, target, read.digest, output)
    write(out, output.files)
    _tell(manifest, target, out, output, as_json=as_json)


def refuse_options(*, accepted: tuple[str, ...], image: str | None) -> None:
    """Refuse options that do not apply to linux-gvisor, which has no losses.

    Raises:
        errors.UsageError: one was given.
    """
    if accepted or image is not None:
        from policy.compile.targets import all as targets_all

        targets_all.refuse_options(accepted=accepted, image=image)


def _facts(package: Package, manifest: Manifest, target: str) -> HostFacts:
    """Return the facts of this host, with the closures of the manifest's programs if the target takes them from
    here."""
    from sandbox import config
    from sandbox.host import facts as host_facts

    settings = config.load(common.readable_state())
    probed = host_facts.probe(settings)
    if target == "kubernetes":
        return probed
    never = artefact_view.own_places(settings)
    return host_facts.for_manifest(probed, manifest, config=settings, package=package.files, extra_never=never)


def _log_first(manifest: Manifest, target: str, package_digest: str, output: Output) -> None:
    """Log the losses that the operator accepts for a target, before a file with them exists."""
    from covenant.keys import identity
    from sandbox.audit.log import Ledger
    from sandbox.storage.trust_state import State

    fields = {
        "run_id": None,
        "operator": identity.OPERATOR,
        "agent_id": manifest.agent.id,
        "target": target,
        "package_digest": package_digest,
        "losses": list(output.accepted),
    }
    home = common.home()
    with (
        State(common.state()) as state,
        Ledger.open(state.path / "audit", head=state.path / "audit-head" / "head.json") as ledger,
    ):
        ledger.append("loss_accepted", fields, issuer=identity.issuer(home), now_ms=times.now_ms())


def _tell(manifest: Manifest, target: str, out: Path, output: Output, *, as_json: bool) -> None:
    if as_json:
        common.emit(
            {
                "kind": "policy_compiled",
                "agent_id": manifest.agent.id,
                "target": target,
                "out": str(out),
                "files": {name: len(data) for name, data in sorted(output.files.items())},
                "accepted": list(output.accepted),
                "losses": [loss.document() for loss in output.losses],
            }
        )
        return
    common.say(f"{manifest.agent.id}: {target}")
    for name, data in sorted(output.files.items()):
        common.say(f"  {common.visible(str(out / name))}  {len(data)} bytes")
    for loss in output.losses:
        word = "accepted" if loss.id in output.accepted else "less"
        concerned = f" ({', '.join(loss.details)})" if loss.details else ""
        common.say(common.visible(f"  {word}: {loss.id}: {loss.says}{concerned}"))
