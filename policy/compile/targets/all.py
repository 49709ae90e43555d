"""Every target of ``covenant policy compile --target`` in one table, with its compiler and what it loses.

linux-gvisor is the target that the grants are written for: its compiler is ``policy.compile.plan``, it loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from policy import errors
from policy.compile.artefacts import canonical
from policy.compile.targets import kubernetes, loss, systemd
from policy.compile.targets.loss import Loss
from policy.data import target_table
from policy.grants.effective import Effective
from policy.host import HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest
from policy.manifest.process import WORKSPACE

NATIVE = "linux-gvisor"
LOSS = "loss.json"


@dataclass(frozen=True, slots=True)
class Order:
    """The input of a target: the policy to compile, and the operator's choices.

    ``image`` is for kubernetes alone: the reference, pinned by digest, of an image that holds package and runtime.
    """

    effective: Effective
    manifest: Manifest
    host: HostFacts
    package_digest: str
    accepted: tuple[str, ...] = ()
    image: str | None = None


class Output(Struct, frozen=True):
    """The files by name, what the target loses of the manifest, and which lost restrictions were accepted."""

    files: Mapping[str, bytes]
    losses: tuple[Loss, ...]
    accepted: tuple[str, ...]


def compile(target: str, order: Order) -> Output:
    """The files of ``target``, with loss.json.

    Raises:
        errors.UsageError: an unknown target, an image that is missing, not pinned or not asked for, or an accepted
            loss that is none of this manifest.
        errors.LossError: the target loses a restriction that was not accepted.
        errors.NotEnforceableError: the manifest cannot be compiled for this target at all.
    """
    if target not in COMPILERS:
        raise errors.UsageError(f"target {text.quote(target)} is not known", hint=f"known: {', '.join(COMPILERS)}")
    if order.manifest.sandbox.backend != NATIVE or order.manifest.agent.runtime == "hermes":
        raise errors.NotEnforceableError(
            f"`{target}` takes only packages for backend `{NATIVE}`",
            hint=f'write backend = "{NATIVE}"',
            where=order.manifest.where("sandbox.backend"),
        )
    _check_process(target, order.manifest)
    _check_image(target, order.image)
    table = target_table.targets()[target]
    losses = loss.report(table, order.effective, order.manifest)
    accepted = loss.accept(table, losses, order.accepted)
    files = COMPILERS[target](order, accepted)
    return Output({**files, LOSS: canonical(loss.document(table, losses, accepted))}, losses, accepted)


def _check_process(target: str, manifest: Manifest) -> None:
    """Refuse what only linux-gvisor gives: layers, the runtime command, a session, a /dev/shm.

    Raises:
        errors.NotEnforceableError: the manifest has one of them.
    """
    process = manifest.process
    demands = {
        "agent.runtime": manifest.agent.runtime == "command" and "runtime `command`",
        "root.base": bool(manifest.root.stack) and "a root of layers",
        "process.contract": process.contract != "line" and f"the contract `{process.contract}`",
        "process.env": bool(process.env) and "variables of the manifest",
        "process.cwd": process.cwd != WORKSPACE and f"the directory `{process.cwd}`",
        "workspace.mode": manifest.workspace.mode is not None and "a workspace",
        "sandbox.dev_shm_mb": bool(manifest.sandbox.dev_shm_mb) and "a /dev/shm of its own",
    }
    for key, demand in demands.items():
        if demand:
            raise errors.NotEnforceableError(
                f"`{target}` has no place for {demand}",
                hint=f"take {key} out, or run the package under linux-gvisor here",
                where=manifest.where(key),
                grant=key,
            )


def refuse_options(*, accepted: tuple[str, ...], image: str | None) -> None:
    """For linux-gvisor, which loses nothing and takes no image.

    Raises:
        errors.UsageError: one was given.
    """
    if image is not None:
        _check_image(NATIVE, image)
    loss.accept(target_table.targets()[NATIVE], (), accepted)


def _check_image(target: str, image: str | None) -> None:
    if target == "kubernetes":
        if image is None:
            raise errors.UsageError(
                "an image that holds the package is missing", hint="--image REGISTRY/NAME@sha256:64-HEX-DIGITS"
            )
        kubernetes.check_image(image)
    elif image is not None:
        raise errors.UsageError(f"`--image` is not for target `{target}`", hint="leave it out")


def _kubernetes(order: Order, accepted: tuple[str, ...]) -> Mapping[str, bytes]:
    assert order.image is not None
    return kubernetes.compile(
        order.effective,
        order.manifest,
        arch=order.host.arch,
        package_digest=order.package_digest,
        image=order.image,
        accepted=accepted,
    )


def _systemd(order: Order, accepted: tuple[str, ...]) -> Mapping[str, bytes]:
    return systemd.compile(
        order.effective, order.manifest, order.host, package_digest=order.package_digest, accepted=accepted
    )


COMPILERS: Mapping[str, Callable[[Order, tuple[str, ...]], Mapping[str, bytes]]] = {
    "kubernetes": _kubernetes,
    "systemd": _systemd,
}
