"""Find the public keys of a host of SSH in the files known_hosts of the machine and of the caller (sshd(8))."""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import hmac
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from covenant.session.typed import SSH
from policy import errors
from policy.manifest import text
from policy.ssh import wire

_MACHINE: Final = Path("/etc/ssh/ssh_known_hosts")
# OpenSSH reads a second file beside each: a key may be revoked there.
_SECOND: Final = "2"
_BYTES: Final = 4 << 20
_HASHED: Final = "|1|"


def files() -> tuple[Path, ...]:
    """The files of the machine, of this process' home, and of the user that called sudo."""
    import pwd

    homes = [os.environ.get("HOME", "")]
    with contextlib.suppress(KeyError, ValueError, OverflowError):
        homes.append(pwd.getpwuid(int(os.environ.get("SUDO_UID", ""))).pw_dir)
    known = (_MACHINE, *(Path(home, ".ssh", "known_hosts") for home in dict.fromkeys(homes) if home))
    return tuple(path for one in known for path in (one, one.with_name(one.name + _SECOND)))


def keys_of(host: str, port: int, known: Sequence[Path]) -> tuple[str, ...]:
    """Return the keys of a host, each as its type and its base64, without those that are revoked.

    Raises:
        errors.UsageError: Raised when no file has a key of it that the service takes, or one is too long.
    """
    wanted = host if port == SSH else f"[{host}]:{port}"
    found: dict[str, None] = {}
    revoked: set[str] = set()
    for marker, names, key in _lines(known):
        if marker in ("", "@revoked") and _names(names, wanted):
            revoked.add(key) if marker else found.setdefault(key)
    keys = tuple(key for key in found if key not in revoked)
    if not keys:
        scan = f"ssh-keyscan {'' if port == SSH else f'-p {port} '}{host} >> ~/.ssh/known_hosts"
        raise errors.UsageError(
            f"--ssh {text.quote(host)}: no known_hosts has a key of this host",
            hint=f"{scan}, after comparing it with what the owner of the host publishes",
        )
    return keys


def _lines(known: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    """Marker, names and key of each line that holds a key which the service takes.

    Lines and words end as for OpenSSH: a comment may hold what a host said of itself (ssh-keyscan(1)), and that must
    not begin a line here.
    """
    for path in known:
        try:
            with path.open("rb") as file:
                raw = file.read(_BYTES + 1)
        except OSError:
            continue
        if len(raw) > _BYTES:
            # A key that is revoked in the rest would be taken.
            raise errors.UsageError(f"{path} has more than {_BYTES} bytes", hint="keep the hosts that are still used")
        for line in raw.split(b"\n"):
            words = [one.decode("ascii", "replace") for one in re.split(rb"[ \t]+", line.rstrip(b"\r")) if one]
            if not words or words[0].startswith("#"):
                continue
            marker = words.pop(0) if words[0].startswith("@") else ""
            if len(words) < 3:
                continue
            key = f"{words[1]} {words[2]}"
            with contextlib.suppress(wire.WireError):
                wire.read_line(key)
                yield marker, words[0], key


def _names(names: str, wanted: str) -> bool:
    """Whether a line's first word names a host: by a list of patterns, or hashed."""
    if names.startswith(_HASHED):
        salt, _, digest = names.removeprefix(_HASHED).partition("|")
        try:
            made = hmac.digest(base64.b64decode(salt, validate=True), wanted.encode(), "sha1")
            return hmac.compare_digest(made, base64.b64decode(digest, validate=True))
        except (binascii.Error, ValueError):
            return False
    patterns = [one.lower().replace("[", "[[]") for one in names.split(",")]
    if any(fnmatch.fnmatchcase(wanted, one[1:]) for one in patterns if one.startswith("!")):
        return False
    return any(fnmatch.fnmatchcase(wanted, one) for one in patterns if not one.startswith("!"))
