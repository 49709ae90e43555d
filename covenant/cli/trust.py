"""``covenant trust``: make the first trust root, and show the one that holds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from covenant.cli import common, times
from policy import errors

if TYPE_CHECKING:
    from policy.signing.trust import TrustRoot
    from sandbox.state import State

WORKING_COPY = "root.json"


@click.group()
def trust() -> None:
    """The trust root: who may sign what."""


@trust.command()
@click.option("--key", "name", required=True, metavar="NAME", help="The operator key to trust.")
@click.option("--agents", multiple=True, default=("*",), metavar="PATTERN", help="Agent ids: exact, or PREFIX*.")
@click.option("--roles", multiple=True, default=("*",), metavar="ROLE", help="Roles that the key may sign, or *.")
@click.option("--expires", default="365d", metavar="TIME", help="How long the trust root holds.  [default: 365d]")
@click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def init(
    name: str,
    agents: tuple[str, ...],
    roles: tuple[str, ...],
    expires: str,
    passphrase_file: str | None,
    as_json: bool,
) -> None:
    """Make version 1 of the trust root, with one key.

    It is written to $COVENANT_HOME/trust/root.json, and as root to the supervisor's state, where it decides.
    """
    from covenant import keystore, signing
    from policy.signing.trust import TrustRoot
    from sandbox.state import State

    home, now_ms = common.home(), times.now_ms()
    lifetime_ms = times.duration_ms(expires, option="--expires")
    supervisor = common.state() if running_as_root() else None
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(State(supervisor)) if supervisor else None
        raw = _working_copy(home)
        if (state is None and raw is not None) or (state is not None and state.has_root()):
            raise errors.TrustError(
                "there is a trust root already",
                hint="covenant trust show prints it; it is replaced only by version N + 1",
                where=str(home / "trust" if state is None else state.path),
            )
        key = keystore.load(home, name, lambda: common.read_passphrase(passphrase_file))
        made = signing.new_root(name, key, now_ms=now_ms, lifetime_ms=lifetime_ms, agents=agents, roles=roles)
        if raw is not None:
            # Made before the state was, or for a state that lay elsewhere: the same document, not a second one.
            signing.check_first_root(raw, made)
        else:
            raw = made
            _write_working_copy(home, raw)
        if state is not None:
            _log_first(state, home, raw, name, now_ms)
            state.init_root(raw, now_ms)
    path = home / "trust" / WORKING_COPY
    root = TrustRoot.parse(raw)
    if as_json:
        common.emit(_document(root, str(path)) | {"kind": "trust_created", "state": str(supervisor or "") or None})
        return
    common.say(f"trust root version 1: {common.visible(str(path))}")
    if supervisor:
        common.say(f"installed in the supervisor's state: {common.visible(str(supervisor))}")
    else:
        common.say("not installed in the supervisor's state: that takes root", err=True)


@trust.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(as_json: bool) -> None:
    """Print the trust root that holds: its keys, and what each may sign."""
    with opened() as held:
        root = held.root
    if as_json:
        common.emit(_document(root, held.source))
        return
    document = root.document
    common.say(f"trust root version {root.version}, {common.visible(held.source)}")
    common.say(f"valid until {times.utc(document.expires_at)}, next version takes {document.threshold} signature(s)")
    if times.now_ms() >= document.expires_at:
        common.say("it has ended: nothing is run until the next version is installed", err=True)
    for key in root.keys:
        common.say(f"  {key.name}  {key.key.keyid}")
        common.say(
            f"    agents {' '.join(key.scope.agents)}; roles {' '.join(key.scope.roles)}; "
            f"{key.threshold} signer(s) needed; until {times.utc(key.expires_at)}"
        )


def running_as_root() -> bool:
    """Whether this process may write the state that decides."""
    return os.geteuid() == 0


@dataclass(frozen=True, slots=True)
class Held:
    """The trust root in use, where it came from, and the state when it came from one."""

    root: TrustRoot
    source: str
    state: State | None


@contextlib.contextmanager
def opened() -> Iterator[Held]:
    """The trust root of the supervisor's state, else the operator's working copy, which decides nothing.

    Its time is not checked here: ``trust.verify`` does.

    Raises:
        errors.TrustError: there is none, or it is malformed.
    """
    from policy.signing.trust import TrustRoot
    from sandbox.state import State

    home = common.home()
    given = os.environ.get("COVENANT_STATE")
    supervisor = Path(given) if given else home / "supervisor"
    with contextlib.ExitStack() as stack:
        # Another uid's state is not ours to read; damage in our own is an error.
        if _is_ours(supervisor):
            state = stack.enter_context(State(supervisor))
            if state.has_root():
                yield Held(state.present_root(), str(supervisor), state)
                return
        raw = _working_copy(home)
        if raw is None:
            raise errors.TrustError("there is no trust root", hint="covenant trust init --key NAME", where=str(home))
        yield Held(TrustRoot.parse(raw), str(home / "trust" / WORKING_COPY), None)


def _is_ours(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def _log_first(state: State, home: Path, raw: bytes, name: str, now_ms: int) -> None:
    """A change of authority is in the supervisor's log before it holds."""
    import hashlib

    from covenant import identity
    from sandbox.ledger import Ledger

    fields = {
        "operator": name,
        "version_from": None,
        "version_to": 1,
        "digest": hashlib.sha256(raw).hexdigest(),
        "signers": [name],
    }
    with Ledger.open(state.path / "audit", head=state.path / "audit-head" / "head.json") as ledger:
        ledger.append("trust_changed", fields, issuer=identity.issuer(home), now_ms=now_ms)


def _working_copy(home: Path) -> bytes | None:
    from policy.signing import root as roots
    from sandbox import durable

    if not (home / "trust").exists():
        return None
    fd = durable.open_directory(home / "trust", error=errors.TrustError)
    try:
        where = str(home / "trust")
        return durable.read(fd, WORKING_COPY, max_bytes=roots.MAX_BYTES, where=where, error=errors.TrustError)
    finally:
        os.close(fd)


def _write_working_copy(home: Path, raw: bytes) -> None:
    from sandbox import durable

    directory = common.private_directory(home / "trust")
    fd = durable.open_directory(directory, error=errors.TrustError)
    try:
        durable.create(fd, WORKING_COPY, raw)
    except OSError as e:
        raise errors.TrustError(f"the trust root cannot be written: {e.strerror}", where=str(directory)) from e
    finally:
        os.close(fd)


def _document(root: TrustRoot, source: str) -> dict[str, object]:
    document = root.document
    return {
        "kind": "trust_root",
        "source": source,
        "version": root.version,
        "not_before": document.not_before,
        "expires_at": document.expires_at,
        "threshold": document.threshold,
        "expired": times.now_ms() >= document.expires_at,
        "keys": [{"keyid": k.key.keyid, **k.model_dump(mode="json")} for k in root.keys],
    }
