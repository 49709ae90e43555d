"""``covenant workspace``: what an agent changed in a directory: look at it, apply it, or throw it away."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli import common, times
from covenant.cli.operator import workspace_client as workspaces
from covenant.cli.operator import workspace_review as review
from policy import errors

if TYPE_CHECKING:
    from policy.workspace.changes import Change

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_RUN = click.argument("run_id", metavar="RUN")
_PATHS = click.argument("paths", nargs=-1, metavar="[PATH]...")
_DIGEST = click.option("--digest", metavar="SHA256", help="Only if the changes are still those of this digest.")
_APPROVAL = click.option(
    "--approval", "file", type=click.Path(path_type=Path), metavar="FILE", help="An operator's approval of the changes."
)
_HEX: Final = frozenset("0123456789abcdef")


@click.group()
def workspace() -> None:
    """Look at what agents changed in directories that were given to them, and apply it.

    A user has the workspaces of its own runs, which a supervisor holds; root has all.
    """


@workspace.command("list", epilog=common.examples("covenant workspace list"))
@_JSON
def list_workspaces(as_json: bool) -> None:
    """List the workspaces whose changes are neither applied nor discarded, with sizes and ages, oldest first."""
    from covenant.cli import terminal

    answer = workspaces.ask("list")
    if as_json:
        common.emit(answer)
        return
    rows = []
    for one in answer["workspaces"]:
        state = _state(one)
        size = f"{-(-one['bytes'] // (1 << 20))} MiB"
        age = times.age(times.now_ms() - one["started_ms"])
        rows.append((one["run_id"][:8], age, size, one["agent_id"], one["directory"], state))
    if rows:
        heads = ("RUN", "AGE", "SIZE", "AGENT", "DIRECTORY", "STATE")
        for line in terminal.table(heads, rows, width=terminal.width(), right=("AGE", "SIZE")):
            common.say(line)
    for name in answer["damaged"]:
        common.say(f"damaged: {common.visible(name)}; fix: covenant workspace discard {common.visible(name)}", err=True)


def _state(one: Mapping[str, Any]) -> str:
    if not one["settled"]:
        return "in use, or cut off"
    return review.counted(one["changes"], one["held"]) if one["compared"] else "not compared yet"


@workspace.command(epilog=common.examples("covenant workspace diff 1f3a", "covenant workspace diff 1f3a --patch"))
@_RUN
@_PATHS
@click.option("--patch", is_flag=True, help="Print a patch that git apply takes, of text files and links.")
@click.option(
    "--html", "file", type=click.Path(path_type=Path), metavar="FILE", help="Write a page that needs nothing else."
)
@_JSON
def diff(run_id: str, paths: tuple[str, ...], patch: bool, file: Path | None, as_json: bool) -> None:
    """Compare a workspace with its directory: each change, and why one of them is not applied.

    The digest is of the changes that `apply` with the same PATHs would do.
    """
    from policy.workspace import page, unified

    answer = workspaces.ask("diff", run=run_id, paths=paths)
    found = workspaces.changes(answer["changes"])
    if file is not None:
        texts = workspaces.texts(answer["run_id"], [one.path for one in found if unified.has_text(one)])
        _write(file, page.page(f"{answer['agent_id']} in {answer['directory']}", found, texts))
    if as_json:
        common.emit(answer)
        return
    if patch:
        review.say_patch(answer["run_id"], found)
    else:
        review.say_changes(found, answer["more"])
        review.say_apart(answer["apart"])
    review.say_digest(answer)


@workspace.command(epilog=common.examples("covenant workspace show 1f3a", "covenant workspace show 1f3a src/a.txt"))
@_RUN
@click.argument("path", required=False)
@click.option("--raw", is_flag=True, help="Write the bytes as they are, to a file or a pipe.")
@_JSON
def show(run_id: str, path: str | None, raw: bool, as_json: bool) -> None:
    """Show a workspace, or the content of a changed file as the agent left it.

    Characters that steer a terminal are written out.
    """
    if path is None:
        _say_about(run_id, as_json=as_json)
        return
    if raw and (as_json or sys.stdout.isatty()):
        raise errors.UsageError("--raw writes bytes, which a terminal obeys", hint="send them to a file or a pipe")
    pieces = workspaces.content(run_id, path.rstrip("/"))
    if as_json:
        _emit_content(pieces)
        return
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for number, (change, data) in enumerate(pieces):
        if change.kind != "file":
            line = f"link to {change.target}" if change.kind == "link" else f"a {change.kind}, mode {change.mode:o}"
            common.say(common.visible(line))
        elif raw:
            common.write(data)
        elif number == 0 and b"\0" in data:
            common.say(f"binary, {change.size} bytes; --raw writes it to a file or a pipe")
            return
        else:
            common.write(common.visible(decoder.decode(data), newlines=True))
    if not raw:
        common.write(common.visible(decoder.decode(b"", final=True)))


def _say_about(run_id: str, *, as_json: bool) -> None:
    answer = workspaces.ask("diff", run=run_id)
    if as_json:
        common.emit(answer)
        return
    for name in ("run_id", "agent_id", "directory", "policy_digest", "apply"):
        common.say(f"{name.replace('_', ' ')}: {common.visible(str(answer[name]))}")
    common.say(f"changes: {review.counted(len(answer['changes']) + answer['more'], answer['held'])}")
    common.say(f"digest: {answer['digest']}")


def _emit_content(pieces: Iterator[tuple[Change, bytes]]) -> None:
    import base64

    found = list(pieces)
    change, data = found[0][0], b"".join(piece for _, piece in found)
    common.emit(
        {
            "kind": "workspace_content",
            "path": change.path,
            "file": change.kind,
            "mode": change.mode,
            "size": change.size,
            "sha256": change.sha256,
            "target": change.target,
            "base64": base64.b64encode(data).decode(),
        }
    )


@workspace.command(epilog=common.examples("covenant workspace apply 1f3a", "covenant workspace apply 1f3a src"))
@_RUN
@_PATHS
@click.option("--ask", is_flag=True, help="Show the changes, and ask: yes, no, each, diff or discard.")
@_DIGEST
@_APPROVAL
@_JSON
def apply(run_id: str, paths: tuple[str, ...], ask: bool, digest: str | None, file: Path | None, as_json: bool) -> None:
    """Apply the changes of a workspace to its directory, or those at and below PATH: all of them, or none.

    It is done with the rights of the directory's owner. What is refused by name stays in the workspace.
    """
    if ask:
        if as_json or digest is not None or file is not None or not sys.stdin.isatty():
            raise errors.UsageError(
                "--ask asks on a terminal, without --json, --digest and --approval", hint="leave --ask out"
            )
        review.review(_whole(run_id), paths)
        return
    answer = workspaces.ask("apply", run=run_id, paths=paths, digest=_checked(digest), approval=_approval(file))
    if as_json:
        common.emit(answer)
    else:
        review.say_applied(answer)


def _checked(digest: str | None) -> str:
    """Return the word of --digest, empty without one.

    Raises:
        errors.UsageError: it is no digest.
    """
    if digest is None:
        return ""
    if len(digest) != 64 or not _HEX.issuperset(digest):
        raise errors.UsageError("--digest takes 64 hexadecimal digits", hint="covenant workspace diff RUN prints them")
    return digest


def _approval(file: Path | None) -> str:
    if file is None:
        return ""
    from policy.signing import approval

    try:
        with file.open("rb") as stream:
            raw = stream.read(approval.MAX_BYTES + 1)
        if len(raw) > approval.MAX_BYTES or not raw:
            raise errors.UsageError(f"`{file}` is no approval", hint="covenant workspace approve RUN --out FILE")
        return raw.decode("ascii")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise errors.UsageError(
            f"`{file}` cannot be read: {why}", hint="covenant workspace approve RUN --out FILE"
        ) from e


@workspace.command(
    epilog=common.examples("covenant workspace approve 1f3a --digest SHA256 --key ann --out 1f3a.dsse.json")
)
@_RUN
@_PATHS
@click.option("--digest", required=True, metavar="SHA256", help="The digest of the changes that you looked at.")
@click.option("--key", "name", metavar="NAME", help="The operator key to sign with.")
@click.option("--ssh-agent", "agent", metavar="KEY", help="Sign with a key of ssh-agent: its comment or fingerprint.")
@click.option("--expires", default="1d", metavar="TIME", help="When the approval ends, at most 30d.  [default: 1d]")
@click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin).")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Where to write it.")
@_JSON
def approve(
    run_id: str,
    paths: tuple[str, ...],
    digest: str,
    name: str | None,
    agent: str | None,
    expires: str,
    passphrase_file: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Approve these very changes as an operator, for a manifest with apply = "operator".

    The approval is signed over the run, its policy and the digest. Where FILE has an approval of the same changes, the
    signature is added.
    """
    from covenant.keys import approving

    wanted, lifetime_ms = _checked(digest), times.duration_ms(expires, option="--expires")
    answer = workspaces.ask("diff", run=run_id, paths=paths)
    if answer["digest"] != wanted:
        raise errors.WorkspaceDigestError(
            f"the changes have the digest {answer['digest']}, not {wanted}",
            hint=f"covenant workspace diff {answer['run_id'][:8]} shows them and their digest",
        )
    door = common.door(name, agent, passphrase_file)
    raw, statement = approving.approval_of(answer, door, out, lifetime_ms=lifetime_ms, now_ms=times.now_ms())
    _write(out, raw.decode("ascii"))
    if as_json:
        common.emit({"kind": "workspace_approval", "file": str(out), "key": door.name, **statement.model_dump()})
        return
    common.say(f"approved {answer['applicable']} changes of run {answer['run_id'][:8]}, until "
               f"{times.utc(statement.expires_at)}")  # fmt: skip
    common.say(common.visible(f"apply them: covenant workspace apply {answer['run_id'][:8]} --approval {out}"))


@workspace.command(epilog=common.examples("covenant workspace branch 1f3a agent/fix"))
@_RUN
@click.argument("name")
@_DIGEST
@_APPROVAL
@_JSON
def branch(run_id: str, name: str, digest: str | None, file: Path | None, as_json: bool) -> None:
    """Commit the changes of a workspace on a new branch NAME of its repository.

    Files and index of the repository stay as they are. Refused and ignored files are left out; the workspace is kept.
    """
    answer = workspaces.ask("branch", run=run_id, name=name, digest=_checked(digest), approval=_approval(file))
    if as_json:
        common.emit(answer)
        return
    common.say(common.visible(f"branch {name} is {answer['commit']}"))
    review.say_changes(workspaces.changes(answer["left"]), answer["more"])


@workspace.command(epilog=common.examples("covenant workspace fork 1f3a"))
@_RUN
@_JSON
def fork(run_id: str, as_json: bool) -> None:
    """Copy a workspace with its changes, so that two runs can go on from it. Prints the name of the copy."""
    answer = workspaces.ask("fork", run=run_id)
    if as_json:
        common.emit(answer)
    else:
        common.say(answer["fork"])


@workspace.command(
    epilog=common.examples("covenant workspace resume 1f3a -- sh", 'covenant workspace resume 1f3a "now the tests"'),
)
@_RUN
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[TEXT | -- COMMAND...]")
@click.pass_context
def resume(ctx: click.Context, run_id: str, words: tuple[str, ...]) -> int:
    """Go on with the changes of a run, in its directory: with its package, or with COMMAND for `covenant exec`.

    The new run is bound as the earlier one was, or more; otherwise it is refused, and the changes stay.
    """
    from covenant.cli.run import command
    from covenant.cli.run import run as running

    one = workspaces.find(run_id)
    given = {"workspace": Path(one["directory"]), "resume": one["run_id"]}
    if not one["package"]:
        if not words:
            raise errors.UsageError(
                f"run {run_id} was a command: {one['agent_id'].removeprefix('exec-')}",
                hint=f"covenant workspace resume {run_id} -- COMMAND",
            )
        return int(ctx.invoke(command.exec_, command=words, **given))
    if len(words) > 1 or not one["package"].startswith("/"):
        raise errors.UsageError(
            f"run {run_id} was one of the package {one['package']}, which takes one TEXT at most",
            hint=f"covenant run PACKAGE TEXT --resume {run_id}",
        )
    text = words[0] if words else None
    return int(ctx.invoke(running.run, package=Path(one["package"]), text=text, **given))


@workspace.command(epilog=common.examples("covenant workspace discard 1f3a"))
@_RUN
@_JSON
def discard(run_id: str, as_json: bool) -> None:
    """Throw the changes of a workspace away. Its directory stays as it is."""
    answer = workspaces.ask("discard", run=run_id)
    if as_json:
        common.emit(answer)
    else:
        common.say(f"discarded the workspace of {answer['run_id'][:8]}")


def _whole(run_id: str) -> str:
    """Return the whole id of the run that a word begins."""
    return str(workspaces.find(run_id)["run_id"])


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as e:
        raise errors.UsageError(f"`{file}` cannot be written: {e.strerror}", hint="name another file") from e
