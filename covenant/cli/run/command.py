"""``covenant exec``: make a manifest for a command, show what it grants, sign it with the local key, run it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import Struct, structs

from covenant.cli import common
from covenant.cli.run import run as running
from covenant.cli.run import session, streams
from covenant.cli.run.how import How
from policy import errors
from policy.package import MANIFEST_NAME, Package

if TYPE_CHECKING:
    from covenant.session.package import Options
    from covenant.session.profiles import Profile
    from policy.layers import LayerRef
    from policy.manifest.agent import Manifest
    from policy.rules import items

_SHOWN_DOMAINS = (
    "filesystem",
    "network",
    "executables",
    "credentials",
    "services",
    "publish",
    "inject",
    "host_ports",
    "ssh",
    "agents",
    "telemetry",
)


class Typed(Struct, frozen=True):
    """The words that a caller typed for one session. An empty ``profile`` is that of the command's name.

    With ``in_checkout`` the working directory is the workspace when it is a checkout of git.
    """

    command: tuple[str, ...]
    profile: str
    net: tuple[str, ...]
    read: tuple[str, ...]
    write: tuple[str, ...]
    layers: tuple[str, ...]
    secrets: tuple[str, ...]
    env: tuple[str, ...]
    role: str
    workspace: Path | None = None
    models: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    inject: tuple[str, ...] = ()
    in_checkout: bool = False
    ssh: tuple[str, ...] = ()


class Session(Struct, frozen=True):
    """A session whose words were checked. ``name`` is its profile's.

    ``left`` says why the working directory is not the workspace, empty where nothing asks for that.
    """

    name: str
    profile: Profile
    options: Options
    command: tuple[str, ...]
    left: str = ""

    def text(self) -> str:
        """Return the manifest."""
        from covenant.session import package

        return package.manifest(self.name, self.profile, self.options, self.command)


@click.command(
    "exec",
    # An option after the command is the command's, and an unknown one before it is a mistake.
    context_settings={"allow_interspersed_args": False},
    epilog=common.examples(
        "covenant exec -- sh -c 'id; uname -a'", "covenant exec --read /srv/docs -- grep -r draft /srv"
    ),
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--profile", metavar="NAME", help="Profile to start from; without it, the one of the command's name.")
@click.option("--net", multiple=True, metavar="HOST[:PORT]", help="Reach this host, port 443 by TLS unless written.")
@click.option("--read", multiple=True, metavar="PATH", help="See this path of the host, read-only.")
@click.option("--write", multiple=True, metavar="VOLUME", help="Write to volume:NAME:/PLACE, or to a mount of yours.")
@click.option("--layer", "layers", multiple=True, metavar="NAME", help="Add a layer of the store over the base.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME[=VAR]", help="Grant a secret: a file, or VAR too.")
@click.option("--inject", multiple=True, metavar="HOST=SECRET[:HEADER]", help="Add a secret to requests, outside.")
@click.option("--ssh", multiple=True, metavar="HOST[:PORT]=SECRET", help="Log in there by a key that stays outside.")
@click.option("--model", "models", multiple=True, metavar="PROVIDER[:MODEL]", help="Ask models, without their key.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Set a variable; its value is in the manifest.")
@click.option(
    "--workspace",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Work on this directory; changes are kept apart.",
)
@click.option("--no-workspace", is_flag=True, help="Take no workspace, where the profile takes this directory.")
@click.option("--resume", metavar="RUN", help="Go on with the changes of an earlier run, in its directory.")
@click.option("--keep-workspace", is_flag=True, help="Keep the workspace for --resume, and do not ask at the end.")
@running.WAIT
@click.option("--publish", multiple=True, metavar="PORT[:TO]", help="Reach this TCP port of the command from here.")
@click.option("--role", metavar="NAME", help="Hold the session to this role, and write it into the manifest.")
@click.option("--save", type=click.Path(path_type=Path), metavar="DIR", help="Write the package there and run nothing.")
@click.option("--tty/--no-tty", default=None, help="Give the command a terminal; without this, where there is one.")
@click.option("--raw", is_flag=True, help="Pass on clipboard and title-report sequences too.")
@click.option(
    "--record", type=click.Path(path_type=Path), metavar="FILE", help="Record what the terminal shows as an asciicast."
)
@click.option("--quiet", is_flag=True, help="Do not show what is granted.")
def exec_(
    command: tuple[str, ...],
    profile: str | None,
    net: tuple[str, ...],
    read: tuple[str, ...],
    write: tuple[str, ...],
    layers: tuple[str, ...],
    secrets: tuple[str, ...],
    inject: tuple[str, ...],
    ssh: tuple[str, ...],
    models: tuple[str, ...],
    env: tuple[str, ...],
    workspace: Path | None,
    no_workspace: bool,
    resume: str | None,
    keep_workspace: bool,
    wait: float,
    publish: tuple[str, ...],
    role: str | None,
    save: Path | None,
    tty: bool | None,
    raw: bool,
    record: Path | None,
    quiet: bool,
) -> int:
    """Run COMMAND with its arguments in a sandbox, with what a profile and these options grant, and nothing else.

    The exit status is the command's, 128 + n for a signal; 125 is a refusal of ours.
    """
    try:
        terminal = _with_terminal(tty, saves=save is not None, record=record)
        if no_workspace and (workspace is not None or resume is not None):
            raise errors.UsageError("--no-workspace goes with no --workspace and no --resume", hint="leave one out")
        workspace = running.resumed_directory(workspace, resume, here=True)
        takes = "" if workspace or no_workspace or not command else _takes_directory(command[0], profile)
        if takes == "directory":
            workspace = Path.cwd()
        # A role and a saved package hold what was asked for by name alone.
        in_checkout = takes == "checkout" and role is None and save is None
        words = Typed(
            command,
            profile or "",
            net,
            read,
            write,
            layers,
            secrets,
            env,
            role or "",
            workspace,
            models,
            publish,
            inject,
            in_checkout,
            ssh,
        )
        made = checked(words, "terminal" if terminal else "stdio")
        project = made.options.workspace
        if keep_workspace and project is None:
            raise errors.UsageError("--keep-workspace needs --workspace", hint="give --workspace DIR")
        if not quiet:
            show(made)
        if save is not None:
            return _saved(save, made)
    except errors.CovenantError as e:
        common.report(e)
        return session.EXIT_REFUSED
    how = How(
        quiet=quiet and not terminal,
        raw=raw,
        record=record,
        workspace=None if project is None else Path(project.directory),
        resume=resume or "",
        keep_workspace=keep_workspace,
        wait=wait,
    )
    name = f"covenant exec {os.path.basename(command[0])}"
    # The package is in memory alone: a killed command leaves no file.
    package = Package({MANIFEST_NAME: made.text().encode()})
    return running.connect(package, None, dev=True, how=how, name=name)


def _takes_directory(program: str, profile: str | None) -> str:
    """Return when the profile of a command takes the working directory as the workspace (profiles.Profile)."""
    from covenant.session import profiles

    return profiles.load(profile or profiles.chosen(os.path.basename(program))).workspace


def _with_terminal(tty: bool | None, *, saves: bool, record: Path | None) -> bool:
    """Whether the command gets a terminal.

    Raises:
        errors.UsageError: it is to have one, and the caller has none.
    """
    has = streams.has_terminal()
    terminal = has if tty is None else tty
    if terminal and not has and not saves:
        raise errors.UsageError(
            "--tty needs a terminal: stdin or stdout is none", hint="run it in a terminal, or leave --tty out"
        )
    if record is not None and (saves or not terminal):
        raise errors.UsageError(
            "--record is for a session with a terminal", hint="run it in a terminal, or leave --record out"
        )
    return terminal


def checked(words: Typed, contract: str) -> Session:
    """Return the session of these words, with everything that it needs looked up.

    Raises:
        errors.CovenantError: one of them is refused, or this host lacks what it names.
    """
    from covenant.session import host, package, profiles, ssh_hosts, typed
    from covenant.session import models as session_models
    from sandbox import config
    from sandbox.host import facts

    typed.command(words.command)
    env = tuple(map(typed.variable, words.env))
    secrets, inject = tuple(map(typed.secret, words.secrets)), tuple(map(typed.inject, words.inject))
    typed.check_variables(env, secrets)
    ssh = tuple(map(typed.ssh, words.ssh))
    net, models = tuple(map(typed.destination, words.net)), tuple(map(typed.model, words.models))
    name = words.profile or profiles.chosen(os.path.basename(words.command[0]))
    profile = profiles.load(name)
    if os.geteuid() != 0:
        raise errors.PrivilegeError(
            "a session needs root: layers and the local key are root's",
            hint="run it with sudo, and give COVENANT_HOME; or have an operator sign a package that you run",
        )
    settings = config.load(common.state())
    found = host.layers(settings.state, profile, words.layers)
    refs: list[LayerRef] = [ref for ref, _ in found]
    never = facts.never_granted(settings, (str(common.home()),))
    project = None if words.workspace is None else host.workspace(words.workspace, profile, never)
    project, left = host.checkout(Path(), profile, never) if words.in_checkout else (project, "")
    options = package.Options(
        base=str(refs[0]),
        layers=tuple(map(str, refs[1:])),
        search=tuple(path for _, search in reversed(found) for path in search),
        net=net,
        read=tuple(map(host.readable, words.read)),
        write=tuple(host.volume(one, settings.state) for one in words.write),
        secrets=secrets,
        models=models,
        model_env=session_models.variables(settings.state, models),
        env=env,
        inject=inject,
        ssh=tuple((one, ssh_hosts.keys_of(one.host, one.port, ssh_hosts.files())) for one in ssh),
        publish=tuple(typed.published(one, os.getcwd()) for one in words.publish),
        role=words.role,
        contract=contract,
        cores=host.cores(),
        workspace=project,
    )
    host.check_program(settings, refs, options, profile, words.command[0])
    outside = (*(one.secret for one in inject), *(one.secret for one in ssh))
    used = (*secrets, *map(typed.SecretWord, outside))
    host.check_secrets(settings, package.agent_id(words.command[0]), used)
    made = Session(name, profile, options, words.command, left)
    parsed(made)
    check_role(made)
    return made


def parsed(made: Session) -> Manifest:
    """Parse a session's manifest. An error names the line itself, since the caller has no file to look it up in."""
    from policy.manifest import parse

    raw = made.text().encode()
    try:
        return parse.parse(raw)
    except errors.ManifestError as e:
        session.name_lines(e, raw)
        raise


def check_known(role: str) -> None:
    """Check that there is a role of this name.

    Raises:
        errors.RoleViolation: there is none.
    """
    from policy import data
    from policy.manifest import text

    names = tuple(data.roles().by_name)
    if role not in names:
        near = text.nearest(role, names)
        meant = f"did you mean `{near}`? " if near else ""
        raise errors.RoleViolation(
            f"role {text.quote(role)} is not known", grant="agent.role", hint=f"{meant}known: {', '.join(names)}"
        )


def check_role(made: Session) -> None:
    """Check that the grants of a session are within its role, if it has one.

    Raises:
        errors.RoleViolation: they are not, or there is no such role.
    """
    from policy import data

    role = made.options.role
    if not role:
        return
    check_known(role)
    over = excess(made, role)
    if over:
        fit = next((name for name in data.roles().by_name if not excess(made, name)), "")
        lines = "; ".join(line for one in over for line in one.lines)
        raise errors.RoleViolation(
            f"profile `{made.name}` with these options asks for more than role `{role}`: {lines}",
            grant=over[0].grant,
            hint=f"{f'give --role {fit}, or ' if fit else ''}leave --role out",
        )


def excess(made: Session, role: str) -> tuple[items.Excess, ...]:
    """Return the grants that a session would have beyond this role, if it named it."""
    from policy import data
    from policy.rules import items, nine

    manifest, roles = parsed(structs.replace(made, options=structs.replace(made.options, role=role))), data.roles()
    return items.excess(manifest, nine.requested(manifest, roles=roles), roles.ceiling(role))


def show(made: Session) -> None:
    """Print the grants of a session on stderr."""
    from covenant.session import profiles
    from policy import data
    from policy.rules import nine

    manifest = parsed(made)
    found = nine.requested(manifest, roles=data.roles()).describe()
    root = ", ".join(one.partition("@")[0] for one in (made.options.base, *made.options.layers))
    common.say(f"exec: profile {made.name} (version {made.profile.version}), {root}", err=True)
    for domain in _SHOWN_DOMAINS:
        for line in found.get(domain, ()):
            common.say(f"  {common.visible(line)}", err=True)
    project = made.options.workspace
    if project is not None:
        place = "" if project.place == project.directory else f" at {project.place}"
        line = f"workspace {project.directory}{place}: changes are kept apart until they are applied"
        common.say(f"  {common.visible(line)}", err=True)
    for secret in made.options.secrets:
        if secret.variable:
            common.say(
                f"  {secret.variable} = secret {secret.name}: every process of the session can read it", err=True
            )
    for variable, one in sorted(made.profile.env.items()):
        common.say(f"  {variable}={common.visible(profiles.value_of(made.profile, variable))}: {one.reason}", err=True)
    for variable, value in made.options.model_env:
        common.say(f"  {variable}={value}: the key stays outside", err=True)
    if manifest.resources.network == "off":
        common.say("  no network", err=True)
    if made.left:
        common.say(f"  no workspace: {common.visible(made.left)}; --workspace DIR gives one", err=True)


def _saved(directory: Path, made: Session) -> int:
    from covenant import scaffold
    from covenant.cli.operator import trust_update_steps

    scaffold.write(directory, scaffold.Scaffold("exec", {"agent.toml": (made.text().encode(), 0o644)}))
    place = common.visible(shlex.quote(str(directory)))
    common.say(f"saved: {trust_update_steps.until_it_runs(place, f'covenant run {place}')}")
    return common.EXIT_DONE
