"""``covenant policy why``, ``diff`` and ``prove``: questions about artefacts. None needs root; a no is status 3."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from covenant.cli import common
from covenant.cli.policy import artefact_view
from policy import errors

if TYPE_CHECKING:
    from covenant.cli.policy.artefact_view import Looked, LookedPackage
    from policy.explain.diff import Diff
    from policy.grants.effective import Effective
    from policy.why.ask import Answer, Question, Sight

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_PATH = click.Path(path_type=Path)
_SHOWN = 12  # lines a row of a diff prints without --json


@click.command(
    epilog=common.examples("covenant policy prove agents/librarian", "covenant policy prove librarian-policy")
)
@click.argument("policy", type=_PATH)
@click.option("--parent", type=_PATH, metavar="PACKAGE", help="As a child: nothing lies beyond this parent.")
@_JSON
def prove(policy: Path, parent: Path | None, as_json: bool) -> None:
    """Read POLICY's artefacts back into grants and show that they are the effective grants.

    POLICY is a package, or a directory that `covenant policy compile` wrote. With --parent a package is compiled as
    that parent's child, and its artefacts are shown to allow nothing that the parent's do not. Status 3 when the
    proof fails.
    """
    from policy import prove as proving

    try:
        looked = artefact_view.look(policy, parent=parent)
        proof = proving.prove(looked.effective, looked.artefacts)
        _same_digest(looked)
        above = None if parent is None else _within(looked, parent)
    except (errors.ProofError, errors.ArtefactError) as e:
        _no_proof(e, as_json=as_json)
    if as_json:
        within = None if above is None else above.artefacts.digest
        common.emit({"kind": "policy_proved", **artefact_view.head(looked), **proof.document(), "within": within})
        return
    artefact_view.say_head(looked)
    for line in proof.lines():
        common.say(f"  {common.visible(line)}")
    common.say("proved: the artefacts allow exactly the effective grants")
    if above is not None:
        common.say(f"proved: nothing in them lies beyond policy {above.artefacts.digest}")
    artefact_view.say_refusals(looked)


def _within(child: Looked, parent: Path) -> Looked:
    """Prove that the parent, at the start of its life, holds all that the child's artefacts allow. Returns the
    parent."""
    from policy import prove as proving

    above = artefact_view.package(parent)
    proving.within(child.artefacts, above.artefacts, remaining_seconds=above.effective.lifetime.ttl_seconds)
    return above


def _same_digest(looked: Looked) -> None:
    """Check that the file ``digest`` of a compiled directory fits its artefacts."""
    from sandbox.storage import artefact_reader

    if isinstance(looked, artefact_view.LookedPackage):
        return
    said = artefact_reader.digest(looked.path)
    if said is not None and said != looked.artefacts.digest:
        raise errors.ProofError("the directory's digest is not that of its artefacts", where=str(looked.path))


def _no_proof(error: errors.CovenantError, *, as_json: bool) -> NoReturn:
    if as_json:
        common.emit({**error.to_json(), "kind": "policy_not_proved", "equal": False})
    else:
        common.say(f"not proved: {common.visible(str(error))} [{error.code}]", err=True)
    sys.exit(common.EXIT_NO)


@click.command(
    epilog=common.examples(
        "covenant policy diff agents/hello agents/librarian",
        "covenant policy diff origin/main:agents/librarian agents/librarian --host none --markdown",
    )
)
@click.argument("old", type=_PATH)
@click.argument("new", type=_PATH)
@artefact_view.HOST
@click.option("--markdown", is_flag=True, help="Print it for a pull request.")
@_JSON
def diff(old: Path, new: Path, host: str | None, markdown: bool, as_json: bool) -> None:
    """Say what changes for the kernel from policy OLD to policy NEW, by risk. Status 3 when it widens.

    Each is a package, a package in a git revision (REVISION:PATH), or a directory that `covenant policy compile` wrote.
    """
    from covenant.cli.policy import pull_request, revisions
    from policy.explain import diff as comparing

    other = artefact_view.OtherHost.of(host)
    with revisions.place(old) as before_at, revisions.place(new) as after_at:
        before, after = artefact_view.look(before_at, other=other), artefact_view.look(after_at, other=other)
    found = comparing.compare_artefacts(before.artefacts, after.artefacts)
    if markdown:
        common.say(pull_request.text(str(old), str(new), found, artefact_view.notes(after)))
    elif as_json:
        common.emit(
            {
                "kind": "policy_diff",
                "old": artefact_view.head(before),
                "new": artefact_view.head(after),
                **found.document(),
            }
        )
    else:
        _say_diff(found)
        artefact_view.say_refusals(after)
    if found.widens:
        sys.exit(common.EXIT_NO)


def _say_diff(found: Diff) -> None:
    common.say(found.summary())
    risk = ""
    for row in found.rows:
        if row.risk != risk:
            risk = row.risk
            common.say(f"{risk}:")
        for sign, lines in (("+", row.added), ("-", row.removed)):
            for line in lines[:_SHOWN]:
                common.say(f"  {sign} {common.visible(line)}")
            if len(lines) > _SHOWN:
                common.say(f"  {sign} and {len(lines) - _SHOWN} more (--json lists them)")
    for name in found.differs:
        common.say(f"  ~ not the same: {common.visible(name)}")
    common.say("it widens what the agent may do" if found.widens else "it widens nothing")


@click.command(
    epilog=common.examples(
        "covenant policy why agents/librarian --open /usr/share/doc/bash",
        "covenant policy why agents/librarian --connect example.org:443",
        "covenant policy why agents/librarian --syscall ptrace",
    )
)
@click.argument("package", type=_PATH)
@click.option("--connect", metavar="HOST:PORT", help="Open a connection; [ADDRESS]:PORT for IPv6.")
@click.option("--protocol", type=click.Choice(("tcp", "tls", "udp")), help="With --connect: by this one.")
@click.option("--open", "path", metavar="PATH", help="Open a file or directory to read.")
@click.option("--write", is_flag=True, help="With --open: to write.")
@click.option("--syscall", metavar="NAME", help="Make a system call.")
@click.option("--exec", "program", metavar="PATH", help="Start a program.")
@click.option("--credential", metavar="NAME", help="Use a secret.")
@click.option("--ssh", metavar="HOST", help="Have a login at this host signed.")
@click.option("--tool", metavar="URI", help="Call a tool of its tools.json, or a command by its name.")
@click.option(
    "--args", "arguments", metavar="JSON", help="With --tool: with these arguments; those of a command are a list."
)
@click.option("--parent", type=_PATH, metavar="PACKAGE", help="Ask whether this parent could allow it.")
@artefact_view.HOST
@_JSON
def why(
    package: Path,
    connect: str | None,
    protocol: str | None,
    path: str | None,
    write: bool,
    syscall: str | None,
    program: str | None,
    credential: str | None,
    ssh: str | None,
    tool: str | None,
    arguments: str | None,
    parent: Path | None,
    host: str | None,
    as_json: bool,
) -> None:
    """Say whether PACKAGE's agent may do one thing, by its artefacts, and what to add when not. Status 3 for no."""
    from policy.why import ask, denied

    called = None if tool is None else _call(package, tool, arguments)
    if called is None and arguments is not None:
        raise errors.UsageError("--args goes with --tool")
    question = _question(connect, protocol, path, write, syscall, program, credential, called, ssh)
    looked = artefact_view.package(package, other=artefact_view.OtherHost.of(host))
    seen_from = sight(looked, parent)
    answer = ask.ask(question, seen_from)
    denial = None if answer.allowed else denied.of_question(question, seen_from)
    cause, where = _cause(looked, answer)
    if as_json:
        common.emit(
            {
                "kind": "policy_why",
                **artefact_view.head(looked),
                **answer.document(),
                "cause": cause or None,
                "where": where or None,
                "denial": denial.id if denial else None,
            }
        )
    else:
        _say_answer(answer, " ".join(part for part in (where, cause) if part))
        if denial is not None:
            common.say(f"an agent that tries is refused as {denial.id}")
        artefact_view.say_refusals(looked)
    if not answer.allowed:
        sys.exit(common.EXIT_NO)


def _question(
    connect: str | None,
    protocol: str | None,
    path: str | None,
    write: bool,
    syscall: str | None,
    program: str | None,
    credential: str | None,
    called: Question | None = None,
    ssh: str | None = None,
) -> Question:
    from policy.why import files, kernel, logins

    if (protocol and connect is None) or (write and path is None):
        raise errors.UsageError("--protocol goes with --connect, --write with --open")
    asked: list[Question] = []
    if connect is not None:
        asked.append(kernel.Connect(*_destination(connect), protocol))  # type: ignore[arg-type]
    if path is not None:
        asked.append(files.Open(path, write))
    if syscall is not None:
        asked.append(kernel.Call(syscall))
    if program is not None:
        asked.append(files.Execute(program))
    if credential is not None:
        asked.append(kernel.Credential(credential))
    if ssh is not None:
        asked.append(logins.SignLogin(ssh.lower()))
    if called is not None:
        asked.append(called)
    if len(asked) != 1:
        raise errors.UsageError(
            "ask one question",
            hint="--connect HOST:PORT, --open PATH, --syscall NAME, --exec PATH, --credential NAME, --ssh HOST or "
            "--tool URI",
        )
    return asked[0]


def _call(package: Path, uri: str, arguments: str | None) -> Question:
    """Return the question about a call of a tool of the package."""
    from policy.manifest.tools import command, document
    from policy.why import tools
    from sandbox.storage import package_reader

    if "/" not in uri:
        if not re.fullmatch(command.NAME, uri):
            hint = "give a name of 1 to 32 of a-z 0-9 . _ + -, the first a letter or digit; or a whole URI"
            raise errors.UsageError(f"`{uri}` is no name of a command", hint=hint)
        return tools.CallCommand(uri, _words(arguments))
    raw = package_reader.read(package).files.get(document.FILE)
    if raw is None:
        raise errors.PackageError(f"the package has no `{document.FILE}`", hint="docs/tools.md says what it holds")
    given = None if arguments is None else _json(arguments)
    if arguments is not None and not isinstance(given, dict):
        raise errors.UsageError("--args is no JSON object", hint="""as in --args '{"path": "/tmp/notes"}'""")
    return tools.CallTool(uri, document.parse(raw), given)


def _words(arguments: str | None) -> tuple[str, ...] | None:
    """Return the arguments of a command."""
    given = [] if arguments is None else _json(arguments)
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise errors.UsageError("--args is no JSON list of texts", hint="""as in --args '["issue", "list"]'""")
    return None if arguments is None else tuple(given)


def _json(arguments: str) -> Any:
    import json

    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _destination(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdecimal() or len(port) > 5 or (":" in host and not bracketed):
        raise errors.UsageError(f"`{text}` is no HOST:PORT", hint="as in example.org:443 or [2001:db8::1]:53")
    return host.strip("[]").lower(), int(port)


def sight(looked: LookedPackage, parent: Path | None) -> Sight:
    """Return the data for questions: a package's artefacts, and the ceilings of its role and of a parent."""
    from policy.manifest import text
    from policy.why import sight as sights

    above: dict[str, Effective] = {}
    if parent is not None:
        found = artefact_view.package(parent, other=looked.other)
        above[f"parent {text.quote(found.manifest.agent.id)}"] = artefact_view.child_ceiling(found.effective)
    return sights.of(
        looked.artefacts, looked.manifest, files=looked.files, host=looked.host, never=looked.never, above=above
    )


def _cause(looked: LookedPackage, answer: Answer) -> tuple[str, str]:
    """The manifest's key and line, or the built-in, that caused the rule which decided."""
    from policy.explain import report

    for row in report.explain(looked.artefacts, where=looked.manifest.where):
        if answer.rule and f"{row.artefact}:{row.rule}" == answer.rule:
            return f"{row.kind}: {row.key}", row.where
    return "", ""


def _say_answer(answer: Answer, cause: str) -> None:
    verdict = "allowed" if answer.allowed else "denied"
    common.say(common.visible(f"{answer.question}: {verdict}, {answer.because}") + (f"  <- {cause}" if cause else ""))
    if answer.never:
        common.say(f"never grantable: {common.visible(answer.never)}")
    if answer.add:
        common.say("to grant it, write in agent.toml and sign again:")
        for line in answer.add:
            common.say(f"  {common.visible(line)}")
        for line in answer.there:
            common.say(common.visible(line))
    for name, allows in answer.bounds.items():
        # A role's ceiling does not list what no manifest is granted.
        if not (allows and answer.never):
            common.say(common.visible(f"{name} {'allows' if allows else 'does not allow'} it"))
