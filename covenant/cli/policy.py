"""``covenant policy compile`` and ``explain``: what a manifest turns into, and why. Neither needs root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    from policy.compile.artefacts import Artefacts
    from policy.manifest.agent import Manifest


@click.group()
def policy() -> None:
    """See what a manifest compiles to, and why."""


@policy.command("compile")
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory to write; must not exist.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compile_(package: Path, out: Path, as_json: bool) -> None:
    """Compile PACKAGE for this host and write every artefact to a new directory."""
    artefacts, manifest = _compile(package)
    write_out(out, {**artefacts.files, "digest": f"{artefacts.digest}\n".encode()})
    if as_json:
        files = {name: len(data) for name, data in sorted(artefacts.files.items())}
        common.emit(
            {
                "kind": "policy_compiled",
                "agent_id": manifest.agent.id,
                "policy_digest": artefacts.digest,
                "out": str(out),
                "files": files,
            }
        )
        return
    common.say(f"{manifest.agent.id}: policy {artefacts.digest}")
    for name, data in sorted(artefacts.files.items()):
        common.say(f"  {common.visible(str(out / name))}  {len(data)} bytes")


def write_out(out: Path, files: Mapping[str, bytes]) -> None:
    """Make the directory and the files in it.

    Whoever owns the directory above can put another in the new one's place: every file is made in the directory
    that was opened, and only where there is none, so that no link there leads root's writing elsewhere.

    Raises:
        errors.UsageError: there is something of that name, or it cannot be written.
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


@policy.command()
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(package: Path, as_json: bool) -> None:
    """Say for every rule in PACKAGE's compiled artefacts which manifest line or default caused it."""
    from policy import explain as explaining
    from policy.manifest import parse

    artefacts, manifest = _compile(package)
    rows = explaining.explain(artefacts, where=manifest.where)
    defaults = [
        {"key": key, "value": value, "reason": reason} for key, value, reason in parse.defaults_applied(manifest)
    ]
    if as_json:
        common.emit(
            {
                "kind": "policy_explained",
                "agent_id": manifest.agent.id,
                "policy_digest": artefacts.digest,
                "rules": [row.document() for row in rows],
                "defaults": defaults,
            }
        )
        return
    common.say(f"{manifest.agent.id}: policy {artefacts.digest}")
    for line in _lines(rows):
        common.say(common.visible(line))
    common.say("defaults that apply:")
    for entry in defaults:
        value = "none" if entry["value"] is None else entry["value"]
        common.say(common.visible(f"  {entry['key']} = {value}  ({entry['reason']})"))


def _lines(rows: tuple[Any, ...]) -> list[str]:
    """The filter's calls are grouped by cause; everything else is a line a rule."""
    out, groups = [], dict[tuple[str, str], list[str]]()
    for row in rows:
        cause = f"{row.where} {row.key}" if row.where else f"{row.kind}: {row.key}"
        reason = f" ({row.reason})" if row.reason and row.reason != row.key else ""
        if row.artefact == "seccomp.bpf" and row.says == "allow":
            groups.setdefault((cause, reason), []).append(row.rule)
        else:
            out.append(f"  {row.artefact:14} {row.rule}: {row.says}  <- {cause}{reason}")
    for (cause, reason), names in groups.items():
        shown = f"{len(names)} calls allowed: {', '.join(names)}" if len(names) > 1 else f"{names[0]} allowed"
        out.append(f"  {'seccomp.bpf':14} {shown}  <- {cause}{reason}")
    return out


def _compile(path: Path) -> tuple[Artefacts, Manifest]:
    """Compile as ``run`` would on this host; the signature is not needed to look."""
    from policy import decide
    from sandbox import config, host, package

    read = package.read(path)
    manifest = decide.manifest_of(read)
    settings = config.load(common.readable_state())
    # The state is ours or not: never grantable either way.
    never = (str(common.home()), os.path.abspath(os.environ.get("COVENANT_STATE") or settings.state))
    facts = host.for_manifest(host.probe(settings), manifest, config=settings, package=read.files, extra_never=never)
    decision = decide.compile_unsigned(read, manifest, host=facts)
    return decision.artefacts, manifest
