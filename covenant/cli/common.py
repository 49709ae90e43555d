"""Functions that every command group shares: homes, JSON, errors on the terminal, passphrases, safe text.

Imports stay light (click and the standard library): ``covenant --help`` imports this module.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from covenant import homes
from covenant import visible as visible_text
from policy import errors

if TYPE_CHECKING:
    from covenant.keys.signers import Signer

home = homes.home
visible = visible_text.visible

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_NO = 0, 1, 2, 3


def examples(*lines: str) -> str:
    """Return the text below a command's options."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def state() -> Path:
    """Return COVENANT_STATE, the state that decides what may start; default: ``$COVENANT_HOME/supervisor``."""
    given = os.environ.get("COVENANT_STATE")
    return homes.private_directory(Path(given) if given else home() / "supervisor")


def readable_state() -> Path:
    """As ``state``, for read-only verbs: if it is another uid's, print a note and use the default."""
    given = os.environ.get("COVENANT_STATE")
    if not given or os.geteuid() == 0 or _is_mine(Path(given)):
        return state()
    say(f"note: `{visible(given)}` is another user's: its configuration is not read, defaults hold", err=True)
    return homes.private_directory(home() / "supervisor")


def _is_mine(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except PermissionError:
        return False
    except OSError:
        return True


def check_package(path: Path) -> None:
    """Refuse the path of a package at which there is nothing.

    Raises:
        errors.PackageError: there is nothing; the fix names a near package, or the path that was looked at.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        from policy.manifest import text

        # A bare name is often meant below agents/.
        places = [path.parent, *([path.parent / "agents"] if len(path.parts) == 1 else [])]
        known = {one.name: one for place in reversed(places) for one in _packages_in(place)}
        near = known.get(path.name) or known.get(text.nearest(path.name, tuple(sorted(known))))
        hint = f"did you mean `{near}`?" if near else f"there is nothing at {path.absolute()}: give its directory"
        raise errors.PackageError(f"there is no package `{path}`", hint=hint, where=str(path)) from None
    except (OSError, ValueError):
        return  # its reader says what is wrong with it


def packages(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the packages: each directory with a manifest, or those right below it.

    Raises:
        errors.PackageError: one of the directories is no package and contains none.
    """
    for directory in directories:
        if (directory / "agent.toml").exists():
            yield directory
            continue
        check_package(directory)
        try:
            below = sorted(one for one in directory.iterdir() if (one / "agent.toml").exists())
        except OSError as e:
            hint = "give a directory that you may list: a package, or one that contains packages"
            message = f"`{directory}` cannot be listed: {e.strerror}"
            raise errors.PackageError(message, hint=hint, where=str(directory)) from e
        if not below:
            hint = f"give a directory with an agent.toml; covenant manifest new {shlex.quote(str(directory / 'ID'))}"
            message = f"`{directory}` is no package and contains none"
            raise errors.PackageError(message, hint=f"{hint} makes one", where=str(directory))
        yield from below


def _packages_in(place: Path) -> list[Path]:
    try:
        return [path.parent for path in place.glob("*/agent.toml")]
    except OSError:
        return []


def emit(document: dict[str, Any]) -> None:
    """Print exactly one JSON document on stdout."""
    write(json.dumps(document, ensure_ascii=True, sort_keys=False) + "\n")


def say(text: str = "", *, err: bool = False) -> None:
    """Print text for people; what came from outside must have gone through ``visible`` first."""
    write(text + "\n", err=err)


def write(text: str | bytes, *, err: bool = False) -> None:
    """As ``say``, without a newline."""
    click.echo(text, err=err, nl=False)


def prompted(prompt: str, *, confirm: bool = False) -> str:
    """Prompt at the terminal without echo; with ``confirm`` twice. Returns the input."""
    return str(click.prompt(prompt, hide_input=True, confirmation_prompt=confirm, err=True))


def typed(limit: int) -> bytes:
    """Read at most ``limit`` bytes of stdin, typed or piped."""
    return sys.stdin.buffer.read(limit)


def confirmed(question: str) -> None:
    """Return if the answer at the terminal is yes.

    Raises:
        errors.UsageError: there is no terminal and stdin has no answer.
        click.Abort: it is not.
    """
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort as e:
        if isinstance(e.__context__, EOFError) and not sys.stdin.isatty():
            say("", err=True)
            raise errors.UsageError("the question has no answer without a terminal", hint="give --yes") from None
        raise


def remark_stderr(text: str) -> None:
    """Show what the agent wrote to stderr, each line marked as the agent's."""
    for line in text.splitlines():
        say(f"agent: {visible(line)}", err=True)


def fail(error: errors.CovenantError, *, as_json: bool) -> NoReturn:
    """Report a refusal and end with its exit status: 2 for usage, else 1."""
    status = EXIT_USAGE if isinstance(error, errors.UsageError) else EXIT_FAILED
    if as_json:
        emit(placed(error).to_json())
    else:
        report(error)
    sys.exit(status)


def placed(error: errors.CovenantError) -> errors.CovenantError:
    """Have a hint about `config.toml` say which file that is. The others stay as they are."""
    if not any("config.toml" in one.hint for one in errors.each(error)):
        return error
    from sandbox import config

    with contextlib.suppress(errors.CovenantError):
        return errors.place_file(error, str(config.file_of(readable_state())))
    return error


def report(error: errors.CovenantError) -> None:
    """Print a refusal and its fix on stderr, and after it the errors that were found with it."""
    for one in errors.each(placed(error)):
        say(f"covenant: {visible(str(one))} [{one.code}]", err=True)
        if one.hint:
            # Lines to write keep their line ends. Each is indented, so that none passes for a line of covenant.
            say(f"  fix: {visible(one.hint, newlines=True).replace(chr(10), chr(10) + '    ')}", err=True)


def read_passphrase(
    file: str | None,
    *,
    prompt: str = "Passphrase",
    confirm: bool = False,
    without_terminal: str = "give --passphrase-file FILE",
) -> bytes:
    """Read a passphrase from ``--passphrase-file``, a systemd credential, or a prompt; never from an argument.

    The file may be ``-`` for stdin. A systemd credential is ``$CREDENTIALS_DIRECTORY/covenant-passphrase``.
    ``without_terminal`` is the hint of the error when there is no terminal.

    Raises:
        errors.KeyFileError: the file is missing, empty or readable by others, or there is no terminal.
    """
    if file == "-":
        return _non_empty(sys.stdin.buffer.readline(), "stdin")
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    if file is None and credentials:
        candidate = Path(credentials) / "covenant-passphrase"
        file = str(candidate) if candidate.exists() else None
    if file is not None:
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as e:
            hint = f"give a file, no link, that uid {os.geteuid()} reads, or --passphrase-file - for stdin"
            raise errors.KeyFileError(f"passphrase file `{file}`: {e.strerror}", hint=hint, where=file) from e
        with os.fdopen(fd, "rb") as stream:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077:
                raise errors.KeyFileError(
                    f"passphrase file `{file}` can be read by others", hint=f"chmod 0600 {file}", where=file
                )
            if info.st_uid not in {0, os.geteuid()}:
                hint = f"chown {os.geteuid()} {file}"
                raise errors.KeyFileError(
                    f"passphrase file `{file}` belongs to uid {info.st_uid}", hint=hint, where=file
                )
            return _non_empty(stream.readline(4096), file)
    if not sys.stdin.isatty():
        raise errors.KeyFileError("a passphrase is needed and there is no terminal", hint=without_terminal)
    return prompted(prompt, confirm=confirm).encode()


def door(name: str | None, agent: str | None, passphrase_file: str | None) -> Signer:
    """Return the signing key: the key file of ``--key``, or the key of ``--ssh-agent``.

    Raises:
        errors.UsageError: neither is given, or both.
        errors.KeyFileError, errors.AgentError: there is no such key.
    """
    from covenant.keys import keystore, signers

    if (name is None) == (agent is None):
        known = list[str]()
        with contextlib.suppress(errors.CovenantError, OSError):
            known = [one.name for one in keystore.entries(home())]
        listed = f" (there is {', '.join(known)})" if name is None and known else ""
        hint = f"give --key NAME{listed} or --ssh-agent KEY"
        raise errors.UsageError("a key to sign with is needed, and one only", hint=hint)
    if agent is not None:
        return signers.agent_key(agent)
    assert name is not None
    # A door that signs twice asks once: stdin has the passphrase once.
    return signers.key_file(home(), name, functools.cache(lambda: read_passphrase(passphrase_file)))


def _non_empty(line: bytes, source: str) -> bytes:
    secret = line.rstrip(b"\r\n")
    if not secret:
        raise errors.KeyFileError(
            f"the passphrase in `{source}` is empty", hint="write it into the first line", where=source
        )
    return secret


def intent_text(text: str) -> str:
    """Return the intent's text, for ``-`` all of stdin.

    Raises:
        errors.UsageError: stdin is not there, too long or not UTF-8.
    """
    from policy import contract

    if text != "-":
        return text
    if sys.stdin is None:
        raise errors.UsageError("there is no stdin to read the intent from")
    raw = typed(contract.INTENT_BYTES + 1)
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise errors.UsageError("the intent on stdin is not UTF-8") from e
