"""``covenant vault``: make the vault, put, replace and remove secrets, and say who was given which.

A secret comes from stdin, a descriptor or a prompt, never from an argument, and is never printed. Every change has its
row in the supervisor's log before it is made.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from covenant.cli import common
from covenant.cli.operator import vault_log
from policy import errors

if TYPE_CHECKING:
    from sandbox.config import Config
    from sandbox.vault.backend import Backend, Before, Change, SecretEntry
    from sandbox.vault.embedded import FileVault
    from sandbox.vault.keys import Key

_Command = TypeVar("_Command", bound=Callable[..., Any])
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_OPEN_BY = click.option(
    "--passphrase-file", metavar="FILE", help="Open it by the passphrase in FILE (- for stdin), not by its key file."
)
_FD = click.option("--fd", type=click.IntRange(0), metavar="N", help="Read the secret from descriptor N, not stdin.")


@click.group()
def vault() -> None:
    """Keep the secrets that agents are granted by name."""


def _new_keys(command: _Command) -> _Command:
    """The options that name the keys of the vault."""
    for option in (
        click.option("--new-passphrase-file", metavar="FILE", help="A passphrase, the first line of FILE."),
        click.option("--new-passphrase", is_flag=True, help="A passphrase, asked for."),
        click.option("--key-file", type=click.Path(path_type=Path), help="A file of random bytes; made if missing."),
    ):
        command = option(command)
    return command


@vault.command(epilog=common.examples("covenant vault init", "covenant vault init --key-file vault.key"))
@_new_keys
@_JSON
def init(key_file: Path | None, new_passphrase: bool, new_passphrase_file: str | None, as_json: bool) -> None:
    """Make an empty vault. Without an option it is opened by the key file of the configuration ([vault] key).

    Runs open it by that file alone; a passphrase is for this command.
    """
    config = vault_config()
    with contextlib.ExitStack() as stack:
        made = _embedded(config, lambda: _opener(config, None))
        key_file = key_file or _configured_file(config, unless=new_passphrase or bool(new_passphrase_file))
        keys, before = _keys(stack, config, key_file, new_passphrase, new_passphrase_file)
        made.create(keys, before=before)
    _say(as_json, {"kind": "vault_created", "path": str(config.state / "vault")}, f"vault {config.state / 'vault'}")
    if key_file and not config.vault.key and not as_json:
        common.say(f"so that runs can open it: {_key_line(config, str(key_file.absolute()))}", err=True)


@vault.command(epilog=common.examples("covenant vault rekey --key-file new.key"))
@_new_keys
@_OPEN_BY
@_JSON
def rekey(
    key_file: Path | None,
    new_passphrase: bool,
    new_passphrase_file: str | None,
    passphrase_file: str | None,
    as_json: bool,
) -> None:
    """Replace the keys of the vault by the ones given here. No other key opens it afterwards.

    To add a passphrase and keep the key file, give both.
    """
    config = vault_config()
    with contextlib.ExitStack() as stack:
        found = _embedded(config, lambda: _opener(config, passphrase_file))
        keys, before = _keys(stack, config, key_file, new_passphrase, new_passphrase_file)
        found.rekey(keys, before=before)
    opens = [] if key_file is None else [str(key_file.absolute())]
    opens += ["a passphrase"] if new_passphrase or new_passphrase_file is not None else []
    _say(as_json, {"kind": "vault_rekeyed", "opens": opens}, f"only this opens the vault now: {', '.join(opens)}")
    _warn_of_locked_runs(config, key_file)


def _warn_of_locked_runs(config: Config, key_file: Path | None) -> None:
    """Warn if the key file of the configuration, by which runs open the vault, is none of its keys."""
    try:
        opened_by_runs(config).entries()
    except errors.VaultKeyError as e:
        words = "--passphrase-file FILE --new-passphrase-file FILE"
        again = f"covenant vault rekey {words} --key-file {config.vault.key or 'FILE'}"
        common.say(f"warning: no run can open it: {common.visible(e.message)}", err=True)
        common.say(f"  fix: {_key_line(config, str(key_file.absolute())) if key_file else again}", err=True)


@vault.command(epilog=common.examples("covenant vault put librarian mail < secret"))
@click.argument("agent")
@click.argument("name")
@_FD
@_OPEN_BY
@_JSON
def put(agent: str, name: str, fd: int | None, passphrase_file: str | None, as_json: bool) -> None:
    """Put a secret NAME for agent id AGENT, read from stdin, without a newline at its end."""
    _keep("put", agent, name, fd, passphrase_file, as_json)


@vault.command(epilog=common.examples("covenant vault rotate librarian mail < secret"))
@click.argument("agent")
@click.argument("name")
@_FD
@_OPEN_BY
@_JSON
def rotate(agent: str, name: str, fd: int | None, passphrase_file: str | None, as_json: bool) -> None:
    """Replace the value of secret NAME of agent id AGENT; later requests get the new one."""
    _keep("rotate", agent, name, fd, passphrase_file, as_json)


def _keep(
    how: Literal["put", "rotate"], agent: str, name: str, fd: int | None, passphrase_file: str | None, as_json: bool
) -> None:
    config = vault_config()
    with _value(fd, passphrase_file) as value:
        found = opened_vault(config, passphrase_file)
        keep = found.put if how == "put" else found.rotate
        entry = keep(agent, name, value, before=vault_log.writer(config, found.name))
    _say_entry(as_json, "secret_put" if how == "put" else "secret_rotated", entry)


@vault.command(epilog=common.examples("covenant vault rm librarian mail"))
@click.argument("agent")
@click.argument("name")
@_OPEN_BY
@_JSON
def rm(agent: str, name: str, passphrase_file: str | None, as_json: bool) -> None:
    """Remove secret NAME of agent id AGENT, with its older versions; who asks next is refused.

    Gates of live runs have stopped using it when this returns.
    """
    from sandbox.control import withdrawn_secrets

    config = vault_config()
    found = opened_vault(config, passphrase_file)
    entry = found.remove(agent, name, before=vault_log.writer(config, found.name))
    unconfirmed = withdrawn_secrets.announce(config.state)
    _say_entry(as_json, "secret_removed", entry)
    if unconfirmed:
        raise errors.KeeperError(
            f"the secret is removed, but runs did not confirm that they stopped using it: {', '.join(unconfirmed)}",
            hint=f"covenant kill {unconfirmed[0]}, or wait: each run also checks every second",
        )


@vault.command("list", epilog=common.examples("covenant vault list", "covenant vault list librarian --json"))
@click.argument("agent", required=False)
@_OPEN_BY
@_JSON
def list_secrets(agent: str | None, passphrase_file: str | None, as_json: bool) -> None:
    """List the secrets of AGENT, or all, by name; and say where the log disagrees with the vault."""
    config = vault_config()
    found = opened_vault(config, passphrase_file)
    entries = found.entries(agent)
    notes = vault_log.disagreements(found.name, entries, agent)
    if as_json:
        common.emit({"kind": "vault", "backend": found.name, "secrets": [_words(e) for e in entries], "notes": notes})
        return
    for entry in entries:
        changed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.changed_ms / 1000))
        common.say(common.visible(f"{entry.agent_id}  {entry.name}  version {entry.version}  {changed}"))
    for note in notes:
        common.say(f"note: {common.visible(note)}", err=True)
    if not entries:
        common.say("no secrets: covenant vault put AGENT NAME", err=True)


@vault.command("grant-log", epilog=common.examples("covenant vault grant-log librarian"))
@click.argument("agent", required=False)
@_JSON
def grant_log(agent: str | None, as_json: bool) -> None:
    """Say what the log has of secrets: what was given to which run, refused, and changed; oldest first."""
    rows = [row for row in vault_log.rows() if agent in (None, row["agent_id"])]
    if as_json:
        common.emit({"kind": "grant_log", "rows": rows})
        return
    for row in rows:
        common.say(common.visible(vault_log.line(row)))
    if not rows:
        common.say("the log has nothing of secrets", err=True)


# --- what opens it ------------------------------------------------------------------------------------------------


def vault_config() -> Config:
    """Return the configuration of this state."""
    from sandbox import config

    return config.load(common.state())


def opened_vault(config: Config, passphrase_file: str | None) -> Backend:
    """Open the vault of this configuration."""
    from sandbox.vault import open as vault_open

    return vault_open.configured(config, lambda: _opener(config, passphrase_file))


def opened_by_runs(config: Config) -> Backend:
    """Open the vault as a run does: by the key file of the configuration alone."""
    from sandbox.vault import open as vault_open

    return vault_open.configured(config)


def _embedded(config: Config, key: Callable[[], contextlib.AbstractContextManager[Key]]) -> FileVault:
    from sandbox.vault.embedded import FileVault

    if config.vault.backend != "file":
        raise errors.UsageError(
            f"the vault of this configuration is {config.vault.backend}, which has tools of its own for that"
        )
    return FileVault(config.state, key)


@contextlib.contextmanager
def _opener(config: Config, passphrase_file: str | None) -> Iterator[Key]:
    """The key file where one is configured, unless a passphrase is given; else a passphrase that is asked for."""
    from sandbox.vault import keys

    kinds = _opened_by(config)
    if config.vault.key and passphrase_file is None:
        with keys.configured(config.vault.key, has_passphrase="passphrase" in kinds) as key:
            yield key
        return
    fixes = {"key-file": _key_line(config, "FILE"), "passphrase": "give --passphrase-file FILE"}
    if passphrase_file is None and kinds == {"key-file"}:
        raise errors.VaultKeyError(
            "a key file opens the vault, and none is configured", hint=fixes["key-file"], where=str(config.state)
        )
    given = common.read_passphrase(
        passphrase_file,
        prompt="Passphrase of the vault",
        without_terminal=", or ".join(fix for kind, fix in fixes.items() if kind in kinds),
    )
    with keys.passphrase(bytearray(given)) as key:
        yield key


def _opened_by(config: Config) -> frozenset[str]:
    """Return the kinds of keys that open the vault. Both where it cannot be read, which is refused later."""
    from sandbox.vault.embedded import FileVault

    with contextlib.suppress(errors.VaultError):
        return FileVault(config.state, lambda: _opener(config, None)).opened_by()
    return frozenset({"key-file", "passphrase"})


def _key_line(config: Config, file: str) -> str:
    """The instruction that makes ``file`` the vault's key file."""
    from sandbox.config import file_of

    return f'write [vault] key = "{file}" in {file_of(config.state)}'


def _configured_file(config: Config, *, unless: bool) -> Path | None:
    from sandbox.config import CREDENTIAL, file_of
    from sandbox.vault import keys

    if unless and not config.vault.key:
        return None
    if not config.vault.key:
        raise errors.UsageError(
            "the vault needs a key",
            hint=f'write [vault] key = "/etc/covenant/vault.key" in {file_of(config.state)}, or give '
            "--key-file FILE or --new-passphrase",
        )
    file = keys.path_of(config.vault.key)
    # INVARIANT: what systemd hands over is never made here: it would be gone with the unit, and the vault with it.
    if config.vault.key.startswith(CREDENTIAL) and not file.exists():
        raise errors.VaultKeyError(
            f"systemd has not given this unit `{config.vault.key}`",
            hint="systemd-creds encrypt, and LoadCredentialEncrypted= in the unit; see docs/vault.md",
            where=str(file),
        )
    return file


def _keys(
    stack: contextlib.ExitStack, config: Config, file: Path | None, prompt: bool, passphrase_file: str | None
) -> tuple[list[Key], Before]:
    """Return the new keys, and what writes the row of the change before it is made.

    A key file that is made here is removed again if the command fails before that row.
    """
    from sandbox.vault import keys

    found, unused = [], stack.enter_context(contextlib.ExitStack())
    if file is not None:
        file = file.absolute()
        if not file.exists():
            keys.make_file(file)
            unused.callback(file.unlink, missing_ok=True)
        found.append(stack.enter_context(keys.configured(str(file))))
    if prompt and passphrase_file is not None:
        raise errors.UsageError("--new-passphrase and --new-passphrase-file exclude each other")
    if prompt or passphrase_file is not None:
        given = common.read_passphrase(passphrase_file, prompt="New passphrase of the vault", confirm=True)
        found.append(stack.enter_context(keys.passphrase(bytearray(given))))
    if not found:
        raise errors.UsageError("the vault needs a key", hint="give --key-file or --new-passphrase")
    write = vault_log.writer(config, "file")

    def before(change: Change) -> None:
        write(change)
        # INVARIANT: from the row on the vault may have this key, also if the command fails later.
        unused.pop_all()

    return found, before


@contextlib.contextmanager
def _value(fd: int | None, passphrase_file: str | None) -> Iterator[memoryview]:
    from sandbox.vault import secret_input

    if fd in (None, 0) and passphrase_file == "-":  # noqa: S105 - the name of a file
        raise errors.UsageError("stdin cannot give both the secret and the passphrase", hint="give --fd N")
    if fd is None and sys.stdin is not None and sys.stdin.isatty():
        text = common.prompted("Secret", confirm=True)
        with secret_input.typed(text) as value:
            yield value
        return
    with contextlib.ExitStack() as stack:
        value = stack.enter_context(secret_input.from_descriptor(0 if fd is None else fd))
        yield value


def _words(entry: SecretEntry) -> dict[str, Any]:
    return {
        "agent_id": entry.agent_id,
        "name": entry.name,
        "version": entry.version,
        "created_ms": entry.created_ms,
        "changed_ms": entry.changed_ms,
    }


def _say_entry(as_json: bool, kind: str, entry: SecretEntry) -> None:
    document = {"kind": kind, **_words(entry)}
    _say(as_json, document, f"{kind.replace('_', ' ')}: {entry.agent_id} {entry.name} version {entry.version}")


def _say(as_json: bool, document: dict[str, Any], text: str) -> None:
    if as_json:
        common.emit(document)
    else:
        common.say(common.visible(text))
