"""``covenant keys``: make and list operator keys. The secret never leaves its file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from covenant.cli import common

if TYPE_CHECKING:
    from covenant.keys.ssh_agent import AgentKey


@click.group()
def keys() -> None:
    """Make and list operator keys."""


@keys.command(epilog=common.examples("covenant keys new operator", "covenant keys new robot --no-passphrase"))
@click.argument("name")
@click.option("--no-passphrase", is_flag=True, help="Leave the key plain, protected by mode 0600 alone.")
@click.option("--passphrase-file", metavar="FILE", help="Read the passphrase from FILE (- for stdin).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def new(name: str, no_passphrase: bool, passphrase_file: str | None, as_json: bool) -> None:
    """Make the key NAME and print its key id."""
    from covenant.keys import keystore
    from policy import errors

    if no_passphrase and passphrase_file:
        raise errors.UsageError("--no-passphrase and --passphrase-file exclude each other")
    home = common.home()
    keystore.check_name(name)
    passphrase = (
        None
        if no_passphrase
        else common.read_passphrase(
            passphrase_file, confirm=True, without_terminal="give --passphrase-file FILE or --no-passphrase"
        )
    )
    key = keystore.new(home, name, passphrase)
    if as_json:
        common.emit({"kind": "key_created", "name": name, "keyid": key.keyid, "public": key.raw.hex()})
    else:
        common.say(key.keyid)
        hint = f"this is the id of `{name}`; its public key, for `trust add NAME --public`: covenant keys public {name}"
        common.say(hint, err=True)


@keys.command("list", epilog=common.examples("covenant keys list", "covenant keys list --json"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_keys(as_json: bool) -> None:
    """List the keys by name, with their ids, and the Ed25519 keys of ssh-agent where there is one."""
    from covenant.keys import keystore

    entries = keystore.entries(common.home())
    agent = _agent_keys()
    if as_json:
        rows = [{"name": e.name, "keyid": e.file.key.keyid, "passphrase": e.protected} for e in entries]
        held = [{"comment": i.comment, "keyid": i.key.keyid, "fingerprint": i.fingerprint} for i in agent]
        common.emit({"kind": "keys", "keys": rows, "agent": held})
        return
    for e in entries:
        common.say(f"{e.file.key.keyid}  {e.name}  {'passphrase' if e.protected else 'plain'}")
    for i in agent:
        common.say(f"{i.key.keyid}  {common.visible(i.comment)}  ssh-agent {i.fingerprint}")
    if not entries and not agent:
        common.say("no keys: covenant keys new NAME", err=True)


def _agent_keys() -> tuple[AgentKey, ...]:
    """Those of the agent that SSH_AUTH_SOCK names; one that does not answer is no reason to hide the key files."""
    if not os.environ.get("SSH_AUTH_SOCK"):
        return ()
    from covenant.keys import ssh_agent
    from policy import errors

    try:
        with ssh_agent.Agent() as agent:
            return agent.identities()
    except errors.AgentError as e:
        common.say(f"note: {common.visible(str(e))}", err=True)
        return ()


@keys.command(epilog=common.examples("covenant keys public operator"))
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def public(name: str, as_json: bool) -> None:
    """Print the public key of NAME in hexadecimal."""
    from covenant.keys import keystore

    key = keystore.entry(common.home(), name).file.key
    if as_json:
        common.emit({"kind": "key_public", "name": name, "keyid": key.keyid, "public": key.raw.hex()})
    else:
        common.say(key.raw.hex())
