"""``covenant learn``: run a command under a ceiling, see what it does, and write the manifest that grants that."""

from __future__ import annotations

import dataclasses
import os
import posixpath
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from msgspec import structs

from covenant.cli import common
from covenant.cli.policy import learnt
from covenant.cli.run import command as sessions
from covenant.cli.run import run as running
from covenant.cli.run import session
from covenant.cli.run.how import How
from policy import errors
from policy.package import MANIFEST_NAME, Package

if TYPE_CHECKING:
    from covenant.session.package import Learnt
    from covenant.session.profiles import Profile
    from policy.learn.observed import Observed
    from policy.learn.propose import LearntProposal
    from policy.rules import items

_BEYOND: Final = "--read would open it"
# Where every host may be reached, only by TLS a gate knows their names.
_NETWORK: Final = "outbound-https-only"


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog=common.examples(
        "covenant learn -- python3 report.py", "covenant learn --within operator-agent --to mine -- git fetch"
    ),
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--profile", metavar="NAME", help="Profile to start from; without it, the one of the command's name.")
@click.option("--within", metavar="ROLE", help="Observe under this role's ceiling, its network too, and keep to it.")
@click.option("--net", multiple=True, metavar="HOST[:PORT]", help="Let the run reach this host, and no other.")
@click.option("--read", multiple=True, metavar="PATH", help="Let the run see this path of the host.")
@click.option("--write", multiple=True, metavar="VOLUME", help="Let it write to volume:NAME:/PLACE, or to a mount.")
@click.option("--layer", "layers", multiple=True, metavar="NAME", help="Add a layer of the store over the base.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME[=VAR]", help="Grant a secret: a file, or VAR too.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Set a variable; its value is in the manifest.")
@click.option(
    "--workspace",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The directory of the run; without it, the working directory. Changes are kept apart.",
)
@click.option("--no-workspace", is_flag=True, help="Give the run no directory of yours.")
@click.option(
    "--to", type=click.Path(path_type=Path), metavar="DIR", help="Write the package there, and not to learnt-COMMAND."
)
@click.option("--quiet", is_flag=True, help="Do not show the ceiling and the proposal.")
def learn(
    command: tuple[str, ...],
    profile: str | None,
    within: str | None,
    net: tuple[str, ...],
    read: tuple[str, ...],
    write: tuple[str, ...],
    layers: tuple[str, ...],
    secrets: tuple[str, ...],
    env: tuple[str, ...],
    workspace: Path | None,
    no_workspace: bool,
    to: Path | None,
    quiet: bool,
) -> int:
    """Run COMMAND in a sandbox under a ceiling, and write an unsigned package that grants what it used.

    The ceiling is what these options grant. The exit status is the command's; 125 is a refusal of ours.
    """
    from policy.learn.observed import Observed

    try:
        if no_workspace and workspace is not None:
            raise errors.UsageError("--no-workspace goes with no --workspace", hint="leave one out")
        directory = None if no_workspace else workspace or Path.cwd()
        words = sessions.Typed(command, profile or "", net, read, write, layers, secrets, env, within or "", directory)
        made = _ceiling(words)
        target = to or Path(f"learnt-{posixpath.basename(command[0])}")
        learnt.check_new(target)
        if not quiet:
            common.say("learn: the ceiling", err=True)
            sessions.show(made)
        seen = Observed()
        project = made.options.workspace
        how = How(quiet=quiet, workspace=None if project is None else Path(project.directory), observe=seen)
        package = Package({MANIFEST_NAME: made.text().encode()})
        name = f"covenant learn {os.path.basename(command[0])}"
        status = running.connect(package, None, dev=True, how=how, name=name)
        if status == session.EXIT_REFUSED:
            return status
        if project is not None:
            learnt.count_changes(project.place, seen)
        taught, found = _taught(made, seen)
        facts = {"command": list(taught.command), "profile": taught.name, "missed": seen.missed}
        learnt.write(target, taught.text(), found, facts)
        learnt.report(target, found, seen, status, quiet=quiet)
    except errors.CovenantError as e:
        common.report(e)
        return session.EXIT_REFUSED
    return status


def _ceiling(words: sessions.Typed) -> sessions.Session:
    """Return the session that is observed: the one of these words, with what of its role belongs to any program.

    Raises:
        errors.CovenantError: a word is refused, or the role does not hold what the words name.
    """
    from covenant.session.package import Learnt

    if not words.role:
        return sessions.checked(words, "stdio")
    made = sessions.checked(structs.replace(words, role=""), "stdio")
    sessions.check_known(words.role)
    options = structs.replace(made.options, role=words.role)
    made = structs.replace(made, options=options, profile=_held(made.profile, words.role))
    project = made.options.workspace
    wide = Learnt(made.profile.programs, exec=project is not None)
    if any(one.domain == "executables" for one in _excess(made, wide)):
        wide = Learnt()
    if not words.net:
        networked = structs.replace(wide, mode=_NETWORK)
        wide = wide if any(one.domain == "network" for one in _excess(made, networked)) else networked
    made = structs.replace(made, options=structs.replace(made.options, learnt=wide))
    sessions.check_role(made)
    return made


def _held(profile: Profile, role: str) -> Profile:
    """Return the profile with limits that the role allows."""
    from policy import data

    most = data.roles().ceiling(role).resources

    def least(value: int, bound: int | None) -> int:
        return value if bound is None else min(value, bound)

    return structs.replace(
        profile,
        seconds=least(profile.seconds * 1000, most.cpu_ms_per_task) // 1000,
        memory_mb=least(profile.memory_mb, most.memory_mb),
        disk_mb=least(profile.disk_mb, most.disk_mb),
        pids_max=least(profile.pids_max, most.pids_max),
        cpu_millis=least(profile.cpu_millis, most.cpu_millis),
    )


def _excess(made: sessions.Session, wide: Learnt) -> tuple[items.Excess, ...]:
    return sessions.excess(structs.replace(made, options=structs.replace(made.options, learnt=wide)), made.options.role)


def _taught(made: sessions.Session, seen: Observed) -> tuple[sessions.Session, LearntProposal]:
    """Return the session that grants what was seen, and the proposal with the evidence.

    Raises:
        errors.InternalError: it would be wider than the ceiling.
    """
    from covenant.session import learning
    from sandbox import config
    from sandbox.host import facts

    options = made.options
    never = facts.never_granted(config.load(common.state()), (str(common.home()),))
    programs = options.learnt.programs if options.learnt else made.profile.programs
    reach = bool(options.net) or bool(options.learnt and options.learnt.mode)
    ceiling = learning.ceiling(options, seen, never, programs=programs, reach=reach)
    found, _, used, trees = learnt.proposed(seen, ceiling, (options.base, *options.layers), _BEYOND)
    about = (
        f"Learnt from one run of: {common.visible(shlex.join(made.command))}",
        f"Profile {made.name}{f', within {options.role}' if options.role else ''}. Read each line, then sign.",
    )
    taught = structs.replace(made, options=learning.narrowed(options, found, used, about), left="")
    if not _is_within(taught, made, trees):
        raise errors.InternalError("what was learnt is wider than its ceiling")
    return taught, found


def _is_within(taught: sessions.Session, made: sessions.Session, trees: Mapping[str, str]) -> bool:
    """Whether the grants of a learnt session are within those of the observed one."""
    from policy import data
    from policy.learn import narrow
    from policy.rules import nine

    options, project = made.options, made.options.workspace
    if project is not None:
        # A file of the workspace is granted at its own place.
        options = structs.replace(options, read=(*options.read, project.directory))
    bound = structs.replace(made, options=options)
    mine, top = (nine.requested(sessions.parsed(one), roles=data.roles()) for one in (taught, bound))
    if not narrow.starts_no_more(mine.executables, top.executables, trees):
        return False
    # A list of programs is below the tree that has them, which the order of grants does not know.
    return dataclasses.replace(mine, executables=top.executables).is_subset(top)
