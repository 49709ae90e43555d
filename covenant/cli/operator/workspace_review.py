"""Show the changes of a workspace, and ask on a terminal which of them are applied."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli import common
from covenant.cli.operator import workspace_client

if TYPE_CHECKING:
    from policy.workspace.changes import Change

_SIGNS: Final = {"add": "+", "modify": "~", "delete": "-", "mode": "m"}


def say_changes(found: Sequence[Change], more: int = 0) -> None:
    """Print one line for each change."""
    from policy.workspace.changes import renames

    old = renames(found)
    for change in found:
        was = f"  was {old[change.path]}" if change.path in old else ""
        why = change.refused or change.conflict
        size = f"  {change.size} bytes" if change.kind == "file" and change.action != "delete" else ""
        slash = "/" if change.kind == "dir" else ""
        word = "refused" if change.refused else "conflict"
        line = f"{_SIGNS[change.action]} {change.path}{slash}{size}{was}" + (f"  {word}: {why}" if why else "")
        common.say(common.visible(line))
    if more:
        common.say(f"and {more} more")


def counted(changes: int, held: int = 0) -> str:
    """Return the number of changes in words, with those that are not applied."""
    words = f"{changes} change" if changes == 1 else f"{changes} changes"
    if held == changes:
        return f"{words}, not applied" if held else words
    return f"{words}, {held} of them not applied" if held else words


def say_apart(apart: Mapping[str, str]) -> None:
    """Print the directories of which nothing is applied, on stderr."""
    from policy.workspace.changes import APART

    for path, kind in sorted(apart.items()):
        common.say(common.visible(f"{path}/ is {APART[kind]}: its changes are not applied"), err=True)


def say_digest(answer: Mapping[str, Any]) -> None:
    """Print the digest of the changes that an apply would do, on stderr."""
    if answer["applicable"]:
        number = len(answer["changes"]) + answer["more"]
        common.say(counted(number, answer["held"]), err=True)
        common.say(f"digest of the {answer['applicable']} that can be applied: {answer['digest']}", err=True)


def patch(run: str, found: Sequence[Change], *, here: bool = False) -> Iterator[str]:
    """Yield the lines of a patch that `git apply` takes."""
    from policy.workspace import unified

    wanted = [one.path for one in found if unified.has_text(one)]
    texts = workspace_client.texts(run, wanted, here=here)
    for change in found:
        yield from unified.patch(change, *texts.get(change.path, (b"", b"")))


def say_applied(answer: Mapping[str, Any]) -> None:
    """Print what an apply did, and what it left."""
    common.say(f"applied {counted(answer['count'])}")
    for kept in answer["kept"]:
        line = f"note: the host changed {kept['path']} at that moment; its content is {kept['name']}"
        common.say(common.visible(line))
    if answer["left"]:
        left = workspace_client.changes(answer["left"])
        held = sum(not one.is_applicable() for one in left)
        common.say(f"still in the workspace: {counted(len(left), held)}")
        say_changes(left, answer["more"])


def review(run: str, paths: Sequence[str] = (), *, here: bool = False) -> None:
    """Show the changes and ask what becomes of them. The answer is for the very changes that were shown.

    Raises:
        errors.WorkspaceDigestError: others are there by the time of the answer.
    """
    shown = workspace_client.ask("diff", here=here, run=run, paths=paths)
    found = workspace_client.changes(shown["changes"])
    say_changes(found, shown["more"])
    if not _may_ask(shown):
        return
    words = ["yes", "no", "each", "diff", "discard"]
    while (word := _answer("apply these changes?", words)) == "diff":
        say_patch(run, found, here=here)
    if word == "yes":
        answer = workspace_client.ask("apply", here=here, run=run, paths=paths, digest=shown["digest"])
        say_applied(answer)
    elif word == "each":
        _each(run, found, here=here)
    elif word == "discard":
        workspace_client.ask("discard", here=here, run=run)
        common.say(f"discarded the workspace of {run[:8]}")


def end_session(run_id: str, *, ask: bool, here: bool) -> None:
    """Tell what a session changed in its workspace. On a terminal, show it and ask what becomes of it.

    ``here`` says that the session was one of this process, without a supervisor.
    """
    found = workspace_client.ask("list", here=here)["workspaces"]
    one = next((row for row in found if row["run_id"] == run_id), None)
    if one is None:
        return
    if ask and one["changes"]:
        review(run_id, here=here)
        left = [row["run_id"] for row in workspace_client.ask("list", here=here)["workspaces"]]
        if run_id in left:
            common.say(f"kept: covenant workspace diff {run_id[:8]}")
        return
    common.say(f"workspace: {_kept(run_id, here=here)}; covenant workspace diff {run_id[:8]}", err=True)


def _kept(run_id: str, *, here: bool) -> str:
    """Return how many changes a session left. Its end is not an error when they cannot be compared."""
    from policy import errors

    try:
        shown = workspace_client.ask("diff", here=here, run=run_id)
    except errors.CovenantError:
        return "changes are kept"
    return counted(len(shown["changes"]) + shown["more"], shown["held"])


def _may_ask(shown: Mapping[str, Any]) -> bool:
    """Whether an answer could apply one of the changes. Otherwise the reason is printed."""
    if shown["apply"] == "never":
        common.say("the manifest says that these changes are never applied")
    elif shown["apply"] == "operator":
        common.say("an operator has to approve these changes:")
        common.say(
            f"  covenant workspace approve {shown['run_id'][:8]} --digest {shown['digest']} --key NAME --out FILE"
        )
    elif shown["changes"] and not shown["applicable"]:
        common.say("none of them can be applied")
    return bool(shown["apply"] == "ask" and shown["applicable"])


def _each(run: str, found: Sequence[Change], *, here: bool) -> None:
    """Ask for each path, then apply those with a yes at once."""
    from policy.workspace import selection

    wanted: list[str] = []
    questions = selection.questions(found)
    for question in questions:
        say_changes(question.changes)
        name = common.visible(question.path)
        while (word := _answer(f"apply {name}?", ["yes", "no", "diff", "stop"])) == "diff":
            say_patch(run, question.changes, here=here)
        if word == "stop":
            break
        if word == "yes":
            wanted += dict.fromkeys(one.path for one in question.changes)
    if not wanted:
        common.say("applied nothing")
        return
    digest = selection.digest(selection.chosen(found, wanted, exact=True))
    say_applied(workspace_client.ask("apply", here=here, run=run, paths=wanted, exact=True, digest=digest))


def say_patch(run: str, found: Sequence[Change], *, here: bool = False) -> None:
    """Print a patch. On a terminal characters that steer it are written out, and elsewhere each stays as it is."""
    seen = sys.stdout.isatty()
    for line in patch(run, found, here=here):
        shown = "\t".join(map(common.visible, line.split("\t"))) if seen else line
        common.write(f"{shown}\n".encode(errors="surrogateescape"))


def _answer(question: str, words: Sequence[str]) -> str:
    """Return one of the words; `no` where the terminal is gone."""
    try:
        return str(click.prompt(question, type=click.Choice(words), default="no"))
    except click.Abort:
        return "no"
