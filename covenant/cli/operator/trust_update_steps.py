"""Code that the verbs of ``covenant trust`` share: the root in use, the signing keys of a step, and its outcome."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from covenant.cli import common, times
from policy import errors

if TYPE_CHECKING:
    from covenant.keys.known_agents import KnownRun
    from covenant.keys.signers import Signer
    from covenant.keys.trust_root import Held, Outcome
    from policy.signing.proposal import Proposal, Side
    from policy.signing.root import OperatorKey, TrustRoot
    from policy.signing.statement import Statement
    from sandbox.control.revocation import Enforced

_Command = TypeVar("_Command", bound=Callable[..., Any])

# As policy.signing.revocation.NAME_PATTERN, without what that imports; tests/unit/covenant/cli/operator/test_trust.py
# compares.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@dataclass(frozen=True, slots=True)
class Signing:
    """The signing keys of a step, as given on the command line."""

    names: tuple[str, ...]
    agents: tuple[str, ...]
    passphrase_file: str | None
    discard: bool
    packages: tuple[str, ...]
    yes: bool

    def doors(self) -> list[Signer]:
        """Return the doors, without unlocking any."""
        found = [common.door(name, None, self.passphrase_file) for name in self.names]
        return found + [common.door(None, agent, None) for agent in self.agents]

    def places(self) -> list[Path]:
        """Return the packages of ``--packages``.

        Raises:
            errors.PackageError: a directory of them does not exist, or has no package: a change would go unasked.
        """
        return list(common.packages([Path(one) for one in self.packages]))


def signing(command: _Command) -> _Command:
    """The options of ``Signing``, given to the command as ``sign_with``, ``sign_with_agent`` and so on."""
    options = (
        click.option("--sign-with", multiple=True, metavar="NAME", help="An operator key that signs this."),
        click.option("--sign-with-agent", multiple=True, metavar="KEY", help="A key of ssh-agent that signs this."),
        click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin)."),
        click.option("--discard-pending", is_flag=True, help="Drop another version that waits for signatures."),
        click.option("--packages", multiple=True, metavar="DIR", help="Look at the packages below DIR too."),
        click.option("--yes", is_flag=True, help="Do not ask about packages that this leaves unsigned."),
        JSON,
    )
    for option in reversed(options):
        command = option(command)
    return command


def signed_by(options: dict[str, Any]) -> Signing:
    """The part of a command's options that ``signing`` added, taken out of them."""
    return Signing(
        options.pop("sign_with"),
        options.pop("sign_with_agent"),
        options.pop("passphrase_file"),
        options.pop("discard_pending"),
        options.pop("packages"),
        options.pop("yes"),
    )


def check_name(name: str) -> str:
    """A name as the trust root can list it.

    Raises:
        errors.UsageError: it cannot; a comment of ssh-agent may be any text.
    """
    if not _NAME.fullmatch(name):
        raise errors.UsageError(
            f"`{name}` cannot be a name in the trust root",
            hint="give one: 1 to 64 of A-Z a-z 0-9 _ . @ -, the first a letter or a digit",
        )
    return name


def running_as_root() -> bool:
    """Whether this process may write the state that decides."""
    return os.geteuid() == 0


def supervisor(home: Path) -> Path:
    """Where the state that decides lies."""
    given = os.environ.get("COVENANT_STATE")
    return Path(given) if given else home / "supervisor"


@contextlib.contextmanager
def opened() -> Iterator[Held]:
    """The trust root of the supervisor's state, else the operator's working copy, which decides nothing.

    Raises:
        errors.TrustError: there is none, or it is malformed.
    """
    from covenant.keys import trust_root

    home = common.home()
    with trust_root.opened(home, supervisor(home)) as held:
        yield held


def until_it_runs(place: str, run: str) -> str:
    """Return the commands that an unsigned package at ``place`` still needs on this host, in their order.

    ``run`` is the last of them. A host without a trust root gets one first: no signature counts there.
    """
    steps = [f"covenant manifest sign {place} --key NAME", run]
    try:
        with opened():
            pass
    except errors.TrustError as e:
        steps[:0] = [e.hint] if e.hint else []
    except errors.CovenantError:
        pass  # the trust root is another user's to see
    return ", then ".join(steps)


def step(
    build: Callable[[Held, Path, int], Proposal],
    options: dict[str, Any],
    *,
    spare: Callable[[], Sequence[Signer]] = tuple,
    serials: tuple[str, int] | None = None,
    ends: bool = False,
) -> None:
    """Build version N + 1, sign it, install or keep it, and say which; ``options`` are those of ``signing``.

    ``serials`` are an agent id and the highest serial that the version revokes: the operator is asked about an agent
    that this host does not know. ``ends`` says that no run ended.
    """
    from covenant.keys import trust_root

    as_json, by = options.pop("as_json"), signed_by(options)
    if not by.names and not by.agents:
        raise errors.UsageError(
            "a key that signs the next version is needed", hint="give --sign-with NAME or --sign-with-agent KEY"
        )
    home, now_ms = common.home(), times.now_ms()
    places = [home / "agents", *by.places()]
    with changing(home) as held:
        wanted, doors, spares = build(held, home, now_ms), by.doors(), spare()
        # A version that is refused is refused before the questions.
        trust_root.prepared(held, home, wanted, doors, now_ms=now_ms, spare=spares, discard=by.discard)
        if serials is not None:
            ask_unknown(held, *serials, places, yes=by.yes, as_json=as_json)
        # A revocation is meant to leave packages unsigned, and is not held up by all that ran.
        ran = () if ends else concerned_runs(held, wanted)
        ask_unsigned(held, wanted, places, ran, yes=by.yes, as_json=as_json)
        outcome = trust_root.advance(
            held, home, wanted, doors, now_ms=now_ms, when=times.utc, spare=spares, discard=by.discard
        )
    report(outcome, as_json=as_json)
    if ends and outcome.decides and not as_json and not outcome.enforced.ended:
        common.say("ended: no run")


def ask_unknown(
    held: Held, agent_id: str, at_most: int, places: Sequence[Path], *, yes: bool = False, as_json: bool = False
) -> None:
    """Say that this host knows no package and no run that a revocation of serials concerns, and ask whether to go on.

    Raises:
        errors.TrustError: this is so, and nothing can be asked with ``--json``.
        click.Abort: the answer is not yes.
    """
    from covenant.keys import known_agents

    doubt = known_agents.agents(places, known_runs(held)).doubt(agent_id, at_most)
    if not doubt:
        return
    common.say(f"warning: {common.visible(doubt)}", err=True)
    if yes:
        return
    if as_json:
        raise errors.TrustError(doubt, hint="check the id and the serial (covenant manifest verify), or give --yes")
    common.confirmed(f"Revoke the serials of `{common.visible(agent_id)}` up to {at_most} anyway?")


def ask_unsigned(
    held: Held,
    wanted: Proposal,
    places: Sequence[Path],
    ran: Sequence[KnownRun],
    *,
    named: Sequence[KnownRun] = (),
    yes: bool = False,
    as_json: bool = False,
) -> None:
    """Name the packages that the version leaves unsigned, and ask whether to go on.

    These are packages below ``places``, and those of the runs ``ran``. Those of the runs ``named`` are only named.
    No package is read where the version takes no signature away.

    Raises:
        errors.TrustError: there are some, and nothing can be asked with ``--json``.
        click.Abort: the answer is not yes.
    """
    from covenant.keys import known_agents, left_unsigned
    from policy.signing import change

    if not change.takes_away(held.root.document, wanted.document):
        return
    packages = known_agents.packages(places, ran)
    others = [one for one in known_agents.packages(places, (*ran, *named)) if one not in packages]
    found, more = (
        left_unsigned.after(some, held.root.document, wanted.document, now_ms=times.now_ms())
        for some in (packages, others)
    )
    for one in (*found, *more):
        path, by = common.visible(str(one.path)), ", ".join(one.signers)
        common.say(f"left unsigned: {common.visible(one.agent_id)} in {path}, signed by {by}", err=True)
    if not found or yes:
        return
    if as_json:
        raise errors.TrustError(
            f"{len(found)} packages would be left unsigned: {', '.join(one.agent_id for one in found)}",
            hint="sign them with a key that stays (covenant manifest sign), or give --yes",
        )
    common.say("they are refused from then on: sign them with a key that stays (covenant manifest sign)", err=True)
    common.confirmed(f"Go on and leave {len(found)} unsigned?")


def listed() -> tuple[OperatorKey, ...] | None:
    """Return the keys of the trust root at hand; None where there is none."""
    root = _root_at_hand()
    return None if root is None else root.keys


def _root_at_hand() -> TrustRoot | None:
    """Return the trust root of this host. Signing needs none: None where no trust root can be read."""
    try:
        with opened() as held:
            return held.root
    except errors.CovenantError:
        return None


def warn_of_refusals(door: Signer, signed: Sequence[Statement], *, agent: str | None) -> None:
    """Say on stderr where runs on this host refuse the statements: an unlisted key, or a revoked serial."""
    root = _root_at_hand()
    if root is None:
        return
    for one in signed:
        if fix := root.document.revoked.retired(one.agent_id, now_ms=one.serial):
            common.say(
                f"warning: the serial of agent `{common.visible(one.agent_id)}` is revoked on this host", err=True
            )
            common.say(f"  fix: {fix}", err=True)
    if any(one.key.keyid == door.key.keyid for one in root.keys):
        return
    name = common.visible(door.name)
    common.say(f"warning: key `{name}` is not in the trust root of this host: runs here refuse its signature", err=True)
    if any(one.name == door.name for one in root.keys):
        fix = f"another key is listed as `{name}`: sign with a key that `covenant trust show` lists"
    else:
        option = "" if agent is None else "--ssh-agent "
        fix = f"covenant trust add {option}{common.visible(shlex.quote(door.name))} --sign-with ROOTKEY"
    common.say(f"  fix: {fix}", err=True)


def known_runs(held: Held) -> tuple[KnownRun, ...]:
    """Return the live and archived runs of this host; none where its state is not ours to read."""
    from covenant.keys import known_agents

    return () if held.state is None else known_agents.runs(held.state.path)


def concerned_runs(held: Held, wanted: Proposal) -> tuple[KnownRun, ...]:
    """Return ``known_runs``; none where the version takes no signature away, so that no record of a run is read."""
    from policy.signing import change

    return known_runs(held) if change.takes_away(held.root.document, wanted.document) else ()


@contextlib.contextmanager
def changing(home: Path, *, fix: str = "") -> Iterator[Held]:
    """As ``opened``, to make a step from; as root only from the state's own root. ``fix`` is for a host without one."""
    from covenant.keys import trust_root

    with trust_root.opened(home, supervisor(home), fix=fix) as held:
        if held.state is None and running_as_root():
            raise errors.TrustError(
                "the supervisor's state has no trust root yet",
                hint="covenant trust init, or covenant trust import FILE --first DIGEST",
                where=str(supervisor(home)),
            )
        yield held


def report(outcome: Outcome, *, as_json: bool) -> None:
    """Say what a step came to."""
    version = outcome.proposal.document.version
    if as_json:
        common.emit(
            {
                "kind": "trust_changed" if outcome.installed else "trust_pending",
                "version": version,
                "decides": outcome.decides,
                "payload_digest": outcome.proposal.payload_digest,
                "place": outcome.place,
                "changes": list(outcome.changes),
                "sides": [side_document(side) for side in outcome.sides],
                **ended_document(outcome.enforced),
            }
        )
        check_ended(outcome.enforced)
        return
    where = common.visible(outcome.place)
    done = "installed" if outcome.decides else "in the working copy"
    common.say(f"trust root version {version}, {done}: {where}" if outcome.installed else f"version {version}:")
    for line in outcome.changes:
        common.say(f"  {common.visible(line)}")
    if outcome.installed and not outcome.decides:
        common.say("not in the supervisor's state, which decides: export it, and import it there as root", err=True)
    say_ended(outcome.enforced)
    if not outcome.installed:
        say_missing(outcome.sides)
        common.say(f"nothing has changed yet; the version is kept until it is signed: {where}")
        common.say("next: covenant trust export FILE; the other signer: covenant trust import FILE --sign-with NAME")
    check_ended(outcome.enforced)


def ended_document(enforced: Enforced) -> dict[str, Any]:
    """The same for ``--json``."""
    return {"ended": [one.row() for one in enforced.ended], "not_done": list(enforced.failed)}


def check_ended(enforced: Enforced) -> None:
    """Leave with status 1 when something that is revoked could not be ended, or written down."""
    if enforced.failed:
        click.get_current_context().exit(common.EXIT_FAILED)


def say_ended(enforced: Enforced) -> None:
    """Which live runs a version has ended, and why."""
    for one in enforced.ended:
        below = "" if one.because == one.run_id else f", below run {one.because}"
        common.say(
            f"ended run {one.run_id} of agent {common.visible(one.agent_id)}{below}: {common.visible(one.reason)}"
        )
    for failure in enforced.failed:
        common.say(f"not done: {common.visible(failure)}", err=True)


def say_missing(sides: Sequence[Side]) -> None:
    """Whose signatures a version waits for."""
    for side in sides:
        signed = f"signed by {', '.join(side.signed)}" if side.signed else "signed by nobody"
        if side.missing is None:
            common.say(f"the keys of version {side.version}: {signed}; those who are left are too few")
        elif side.missing:
            common.say(f"the keys of version {side.version}: {signed}; {side.missing} more of {', '.join(side.open)}")
        else:
            common.say(f"the keys of version {side.version}: {signed}; enough")


def side_document(side: Side) -> dict[str, Any]:
    """One side for ``--json``; ``missing`` null where all who are left would be too few."""
    return {"version": side.version, "signed": list(side.signed), "open": list(side.open), "missing": side.missing}


def document(root: TrustRoot, source: str) -> dict[str, Any]:
    """A trust root for ``--json``."""
    content = root.document
    return {
        "kind": "trust_root",
        "source": source,
        "version": root.version,
        "payload_digest": root.payload_digest,
        "not_before": content.not_before,
        "expires_at": content.expires_at,
        "threshold": content.threshold,
        "expired": times.now_ms() >= content.expires_at,
        "keys": [{"keyid": k.key.keyid, **k.model_dump(mode="json")} for k in root.keys],
        "revoked": content.revoked.model_dump(mode="json"),
    }
