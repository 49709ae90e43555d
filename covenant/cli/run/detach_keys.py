"""The keys that detach this terminal from a session: by default Ctrl-P Ctrl-Q, as in Docker and containerd."""

from __future__ import annotations

from typing import Final

import click

from policy import errors

DEFAULT: Final = "ctrl-p,ctrl-q"
NONE: Final = "none"
_CTRL: Final = "ctrl-"
_HINT: Final = "write keys as `ctrl-p,ctrl-q`: letters, digits, or ctrl- with a letter or one of @[\\]^_; or `none`"

OPTION = click.option(
    "--detach-keys",
    default=DEFAULT,
    metavar="KEYS",
    help=f"In a terminal: the keys that detach it and let the session go on ({DEFAULT}); `{NONE}` for none.",
)


class DetachKeys:
    """Look for the keys in what is typed. They are not passed on; a beginning of them waits for the next key."""

    def __init__(self, keys: bytes) -> None:
        self._keys, self._held = keys, 0

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Return what is passed on, and whether the keys were typed. What follows them is dropped."""
        out = bytearray()
        for byte in data:
            if byte == self._keys[self._held]:
                self._held += 1
                if self._held == len(self._keys):
                    return bytes(out), True
                continue
            # The keys may begin within what was held: such as Ctrl-P after Ctrl-P.
            held = self._keys[: self._held] + bytes([byte])
            self._held = next(n for n in range(len(held) - 1, -1, -1) if held.endswith(self._keys[:n]))
            out += held[: len(held) - self._held]
        return bytes(out), False


def parse(written: str) -> bytes:
    """Return the keys that an option names; empty for `none`.

    Raises:
        errors.UsageError: it names no keys.
    """
    return b"" if written == NONE else b"".join(_key(one) for one in written.split(","))


def shown(keys: bytes) -> str:
    """Return the keys for a reader: `Ctrl-P Ctrl-Q`."""
    return " ".join(f"Ctrl-{chr(key + 64)}" if key < 32 else chr(key) for key in keys)


def _key(name: str) -> bytes:
    rest = name.removeprefix(_CTRL)
    if len(rest) == 1 and rest.isascii():
        if rest == name and rest.isalnum():
            return rest.encode()
        if rest != name and (rest.isalpha() or rest in "@[\\]^_"):
            return bytes([ord(rest.upper()) - 64])
    raise errors.UsageError(f"--detach-keys `{name}` is no key", hint=_HINT)
