"""``covenant policy``: compile and explain a manifest; ``policy_questions`` answers questions about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from covenant.cli import common
from covenant.cli.policy import artefact_view, questions, targets
from policy import errors


@click.group()
def policy() -> None:
    """See what a manifest compiles to, and why."""


@policy.command(
    "compile",
    epilog=common.examples(
        "covenant policy compile agents/hello --out hello-policy",
        "covenant policy compile agents/hello --target systemd --out hello-unit",
    ),
)
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory to write; must not exist.")
@click.option("--target", type=click.Choice(targets.TARGETS), default=targets.NATIVE, show_default=True)
@click.option("--accept-loss", "accepted", multiple=True, metavar="ID", help="A restriction that the target may lose.")
@click.option("--image", metavar="REF", help="Kubernetes: the image with package and runtime, NAME@sha256:DIGEST.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compile_(
    package: Path, out: Path, target: str, accepted: tuple[str, ...], image: str | None, as_json: bool
) -> None:
    """Compile PACKAGE for this host, or another target, and write every artefact to a new directory."""
    if target != targets.NATIVE:
        targets.compile_for(package, target, out=out, accepted=accepted, image=image, as_json=as_json, write=write_out)
        return
    targets.refuse_options(accepted=accepted, image=image)
    looked = artefact_view.package(package)
    artefacts = looked.artefacts
    write_out(out, {**artefacts.files, "digest": f"{artefacts.digest}\n".encode()})
    if as_json:
        files = {name: len(data) for name, data in sorted(artefacts.files.items())}
        common.emit({"kind": "policy_compiled", **artefact_view.head(looked), "out": str(out), "files": files})
        return
    artefact_view.say_head(looked)
    artefact_view.say_refusals(looked)
    for name, data in sorted(artefacts.files.items()):
        common.say(f"  {common.visible(str(out / name))}  {len(data)} bytes")


def write_out(out: Path, files: Mapping[str, bytes]) -> None:
    """Make the directory and the files in it.

    The owner of the directory above can replace the new one. So every file is made with O_EXCL in the opened directory,
    and no link can redirect root's writing.

    Raises:
        errors.UsageError: the name exists, or it cannot be written.
    """
    try:
        out.mkdir(mode=0o755)
        directory = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name, data in files.items():
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(name, flags, 0o644, dir_fd=directory), "wb") as stream:
                    stream.write(data)
        finally:
            os.close(directory)
    except OSError as e:
        raise errors.UsageError(f"`{out}` cannot be made: {e.strerror}", hint="name a new directory") from e


@policy.command(
    epilog=common.examples(
        "covenant policy explain agents/librarian", "covenant policy explain agents/librarian --parent agents/hello"
    )
)
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--parent", type=click.Path(path_type=Path), metavar="PACKAGE", help="As a child of this parent.")
@artefact_view.HOST
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(package: Path, parent: Path | None, host: str | None, as_json: bool) -> None:
    """Say for every rule in PACKAGE's artefacts which manifest line, default or ceiling of a parent caused it."""
    from policy.explain import report as explaining
    from policy.manifest import parse

    looked = artefact_view.package(package, parent=parent, other=artefact_view.OtherHost.of(host))
    manifest = looked.manifest
    rows = explaining.explain(looked.artefacts, where=manifest.where)
    defaults = [
        {"key": key, "value": value, "reason": reason} for key, value, reason in parse.defaults_applied(manifest)
    ]
    if as_json:
        common.emit(
            {
                "kind": "policy_explained",
                **artefact_view.head(looked),
                "rules": [row.document() for row in rows],
                "defaults": defaults,
            }
        )
        return
    artefact_view.say_head(looked)
    artefact_view.say_refusals(looked)
    for line in _lines(rows):
        common.say(common.visible(line))
    common.say("defaults that apply:")
    for entry in defaults:
        value = "none" if entry["value"] is None else entry["value"]
        common.say(common.visible(f"  {entry['key']} = {value}  ({entry['reason']})"))


def _lines(rows: tuple[Any, ...]) -> list[str]:
    """Return the lines to print: the filter's calls grouped by cause, every other rule on a line of its own."""
    out, groups = [], dict[tuple[str, str], list[str]]()
    for row in rows:
        cause = f"{row.where} {row.key}" if row.where else f"{row.kind}: {row.key}"
        reason = f" ({row.reason})" if row.reason and row.reason != row.key else ""
        reason += f" [narrowed by the parent: {row.parent}]" if row.parent else ""
        if row.artefact == "seccomp.bpf" and row.says == "allow":
            groups.setdefault((cause, reason), []).append(row.rule)
        else:
            out.append(f"  {row.artefact:14} {row.rule}: {row.says}  <- {cause}{reason}")
    for (cause, reason), names in groups.items():
        shown = f"{len(names)} calls allowed: {', '.join(names)}" if len(names) > 1 else f"{names[0]} allowed"
        out.append(f"  {'seccomp.bpf':14} {shown}  <- {cause}{reason}")
    return out


for command in (questions.why, questions.diff, questions.prove):
    policy.add_command(command)
