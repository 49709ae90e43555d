"""Read the words that a caller typed for a session, and refuse what no manifest may hold, with its place."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from policy import errors
from policy.manifest import process, services, text
from policy.manifest.permissions import CREDENTIAL_NAME, INJECT_HEADER

HTTPS: Final = 443
SSH: Final = 22
_PORTS = 65_535
_PUBLISH = "write --publish PORT, --publish PORT:/PATH or --publish PORT:127.0.0.1:PORT"
_PLAIN = frozenset("\n\t")
# Variables to which sh, dash or bash give a meaning: an assignment evaluates the value, prints it in an error, or is
# lost. OPTIND of bash starts what an index in the value names.
_OF_SHELLS = frozenset(
    (
        *("ATTY", "BASHOPTS", "BASHPID", "COMP_WORDBREAKS", "DIRSTACK", "ENV", "EPOCHREALTIME", "EPOCHSECONDS"),
        *("EUID", "FUNCNAME", "GROUPS", "HISTCMD", "HISTSIZE", "IFS", "LANG", "LANGUAGE", "LINENO", "MAIL"),
        *("MAILPATH", "OLDPWD", "OPTARG", "OPTERR", "OPTIND", "PATH", "PIPESTATUS", "POSIXLY_CORRECT", "PPID", "PS1"),
        *("PS2", "PS4", "PWD", "RANDOM", "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "TERM", "UID", "_"),
    )
)
_FAMILIES_OF_SHELLS = ("BASH_", "LC_")


class SecretWord(Struct, frozen=True):
    """A secret of the vault. It is a file, and with ``variable`` an environment variable of that name too."""

    name: str
    variable: str = ""


class ModelWord(Struct, frozen=True):
    """Models of a provider: ``pattern`` as a manifest writes it."""

    provider: str
    pattern: str


class InjectWord(Struct, frozen=True):
    """A secret of the vault that the gate adds to each request to a host, in this header."""

    host: str
    secret: str
    header: str = "Authorization"


class SshWord(Struct, frozen=True):
    """A secret of the vault, a private key that signs logins at a host."""

    host: str
    port: int
    secret: str


class Destination(Struct, frozen=True):
    """A host that a session may reach, at one port."""

    host: str
    port: int


def command(words: Sequence[str]) -> None:
    """Check a command and its arguments.

    Raises:
        errors.UsageError: Raised when there is no command, or a word cannot be in a manifest.
    """
    if not words or not words[0].strip():
        raise errors.UsageError("there is no command", hint="write it after the options: covenant exec -- sh")
    for number, word in enumerate(words):
        place = f"argument {number} of the command" if number else "the command"
        _shown(word, place)
        if process.INTENT in word:
            raise errors.UsageError(
                f"{place} holds {process.INTENT}, which a manifest keeps for the text of an intent: {text.quote(word)}",
                hint="have a shell put it together: sh -c 'echo {int\"\"ent}'",
            )


def variable(written: str) -> tuple[str, str]:
    """Split NAME=VALUE of ``--env``.

    Raises:
        errors.UsageError: Raised when it has no value, or a manifest cannot hold it.
    """
    name, equals, value = written.partition("=")
    if not equals:
        raise errors.UsageError(f"--env {text.quote(written)} has no value", hint="write --env NAME=VALUE")
    _check_variable(name, f"--env {text.quote(written)}", "write --env NAME=VALUE")
    _shown(value, f"the value of --env {name}")
    return name, value


def secret(written: str) -> SecretWord:
    """Split NAME or NAME=VAR of ``--secret``.

    Raises:
        errors.UsageError: Raised when one of the two is no name.
    """
    name, equals, target = written.partition("=")
    place = f"--secret {text.quote(written)}"
    if not re.fullmatch(CREDENTIAL_NAME, name):
        raise errors.UsageError(
            f"{place} has no name of a secret",
            hint="write --secret NAME or --secret NAME=VAR, as `covenant vault list`",
        )
    if equals:
        hint = "write --secret NAME=VAR, where VAR is a variable such as MAIL_TOKEN"
        _check_variable(target, place, hint)
        if target in _OF_SHELLS or target.startswith(_FAMILIES_OF_SHELLS):
            raise errors.UsageError(f"{place} sets {target}, which is a shell's own", hint=hint)
    return SecretWord(name, target)


def model(written: str) -> ModelWord:
    """Split PROVIDER or PROVIDER:MODEL of ``--model``. Without a model it is every model of the provider.

    Raises:
        errors.UsageError: Raised when one of the two is no name.
    """
    provider, colon, pattern = written.partition(":")
    if not re.fullmatch(services.PROVIDER, provider) or (colon and not re.fullmatch(services.PATTERN, pattern)):
        raise errors.UsageError(
            f"--model {text.quote(written)} names no model of a provider",
            hint='write --model PROVIDER or --model PROVIDER:MODEL, such as local:test-1 or "anthropic:claude-*"',
        )
    return ModelWord(provider, pattern or "*")


def inject(written: str) -> InjectWord:
    """Split HOST=SECRET or HOST=SECRET:HEADER of ``--inject``.

    Raises:
        errors.UsageError: Raised when one of them is none.
    """
    host, equals, rest = written.partition("=")
    name, colon, header = rest.partition(":")
    fine = (
        host and equals and re.fullmatch(CREDENTIAL_NAME, name) and (not colon or re.fullmatch(INJECT_HEADER, header))
    )
    if not fine:
        raise errors.UsageError(
            f"--inject {text.quote(written)} is no host with a secret",
            hint="write --inject HOST=SECRET or --inject HOST=SECRET:HEADER, such as api.example.com=token:X-Api-Key",
        )
    return InjectWord(host, name, header or "Authorization")


def ssh(written: str) -> SshWord:
    """Split HOST=SECRET or HOST:PORT=SECRET of ``--ssh``.

    Raises:
        errors.UsageError: Raised when one of them is none.
    """
    where, _, name = written.rpartition("=")
    host, colon, port = where.rpartition(":")
    if not colon or ":" in host:
        host, port = where, str(SSH)
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= _PORTS
    if not host or not is_port or not re.fullmatch(CREDENTIAL_NAME, name):
        raise errors.UsageError(
            f"--ssh {text.quote(written)} is no host with a secret",
            hint="write --ssh HOST=SECRET or --ssh HOST:PORT=SECRET, such as git.example.org=deploy",
        )
    return SshWord(host.lower(), int(port), name)


def check_variables(env: Sequence[tuple[str, str]], secrets: Sequence[SecretWord]) -> None:
    """Check that no variable is a secret's, and that each is set once.

    Raises:
        errors.UsageError: Raised when one is.
    """
    names = [name for name, _ in env]
    names += [one.variable for one in secrets if one.variable]
    for name in names:
        owner = next((one for one in secrets if name == one.variable or (name == one.name and not one.variable)), None)
        if owner is not None and name in dict(env):
            raise errors.UsageError(
                f"--env {name} has the name of the secret `{owner.name}`",
                hint=f"leave --env {name} out: its value would be in the manifest, for every reader",
            )
        if names.count(name) > 1:
            raise errors.UsageError(f"the variable {name} is given twice", hint="give it once")


def destination(written: str) -> Destination:
    """Split HOST or HOST:PORT of ``--net``. An IPv6 address with a port is in brackets.

    Raises:
        errors.UsageError: Raised when the port is no port.
    """
    if scheme := re.match("[A-Za-z][A-Za-z0-9+.-]*://", written):
        name = re.split("[/?#]", written[scheme.end() :])[0]
        name += ":80" if name and ":" not in name and scheme[0].lower() == "http://" else ""
        raise errors.UsageError(
            f"--net {text.quote(written)} is a URL", hint=f"write --net {name}" if name else "write --net HOST"
        )
    host, colon, port = written.rpartition(":")
    if not colon or written.endswith("]") or (":" in host and not host.startswith("[")):
        return Destination(written.strip("[]"), HTTPS)
    if not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) <= _PORTS:
        raise errors.UsageError(
            f"--net {text.quote(written)} has no port from 1 to {_PORTS}", hint="write --net HOST or --net HOST:PORT"
        )
    return Destination(host.strip("[]"), int(port))


def published(written: str, directory: str) -> tuple[int, str]:
    """Split PORT or PORT:TO of ``--publish``. Without a place, it is a socket in ``directory``.

    Raises:
        errors.UsageError: Raised when the port is no port, or the place is none.
    """
    port, colon, to = written.partition(":")
    if not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) <= _PORTS:
        raise errors.UsageError(f"--publish {text.quote(written)} has no port from 1 to {_PORTS}", hint=_PUBLISH)
    if not colon:
        to = posixpath.join(directory, f"port-{int(port)}.sock")
    if to.startswith("/"):
        to = f"{services.UNIX}{to}"
    if not to.startswith((services.UNIX, services.LOOPBACK)):
        raise errors.UsageError(f"--publish {text.quote(written)} has no place", hint=_PUBLISH)
    return int(port), to


def _check_variable(name: str, place: str, hint: str) -> None:
    if not re.fullmatch(process.VARIABLE, name):
        raise errors.UsageError(f"{place} has no name of a variable", hint=hint)
    if name in process.NEVER_SET:
        raise errors.UsageError(f"{place} sets {name}, which no session may set", hint="leave it out")


def _shown(word: str, place: str) -> None:
    """Refuse a word that a reader of the manifest would not see as it is."""
    for ch in word:
        if ch in _PLAIN or unicodedata.category(ch) not in text.HIDDEN:
            continue
        if unicodedata.category(ch) == "Cs":
            raise errors.UsageError(
                f"{place} is not UTF-8: {text.quote(word)}", hint="give it in UTF-8, or have the program make the bytes"
            )
        raise errors.UsageError(
            f"{place} holds the hidden character U+{ord(ch):04X}: {text.quote(word)}",
            hint="leave the character out, or have the program make it: printf '\\033' writes an escape",
        )
    if len(word) > process.ARGUMENT_CHARACTERS:
        raise errors.UsageError(
            f"{place} has {len(word)} characters",
            hint=f"at most {process.ARGUMENT_CHARACTERS} are accepted: pass the rest on stdin, or as a file by --read",
        )
