"""Take out of an agent's output the escape sequences that would reach past the terminal's screen.

- OSC 52 and OSC 5522 write the user's clipboard, or have the terminal type it. OSC 1337 and its older name 50 do that
  in iTerm2, and write files. OSC 51 calls functions of the editors whose terminal it is (Vim, Emacs).
- CSI 20 t and CSI 21 t have the terminal type its title, which an agent can set to a command.
- DCS: keys that type a text (DECUDK), and what a multiplexer hands to the terminal around it as it is. Images (sixel),
  questions for settings and synchronized updates pass.
- ESC % turns UTF-8 off, after which the bytes of a character are sequences. ESC % G turns it on, and passes.

Everything else passes as it came. A sequence that is taken out leaves one CAN (0x18) in its place: the terminal drops
an unfinished sequence at a CAN, so the bytes on both sides never join to a new one. The output is never longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_OSC_REACHING: Final = frozenset({50, 51, 52, 1337, 5522})
_TITLES: Final = frozenset({20, 21})
# Some terminals keep 32 bits of a number (tmux 3.3a reads 4294967348 as 52). No program has a use for a larger one.
_LARGEST: Final = 65_535
_DCS_PASSING: Final = re.compile(rb"[0-9;]*(?:[$+]?q|[$+]r)|=[12]s")
# A sequence that is longer before it can be judged is no sequence of a program, and is taken out.
_MOST: Final = 512
_BEL, _CAN, _SUB, _ESC, _ST8 = 0x07, 0x18, 0x1A, 0x1B, 0x9C
_DCS8, _CSI8, _OSC8 = 0x90, 0x9B, 0x9D
_CAN_BYTE: Final = b"\x18"
# Whole characters that begin no sequence. In UTF-8, C2 90, C2 9B and C2 9D are the introducers DCS, CSI and OSC.
_PLAIN: Final = re.compile(
    rb"(?:[\x00-\x1a\x1c-\x7f]|\xc2[\x80-\x8f\x91-\x9a\x9c\x9e-\xbf]|[\xc3-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]"
    rb"|[\xe1-\xef][\x80-\xbf]{2}|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf4][\x80-\xbf]{3})+"
)
_LEADS: Final = ((0xC2, 0xDF, 1), (0xE0, 0xEF, 2), (0xF0, 0xF4, 3))
# The least second byte. A character that is longer than it has to be is none, and may hide a C1 introducer.
_SECOND: Final = {0xE0: 0xA0, 0xF0: 0x90}
# The text of a DCS string, which is ASCII.
_STRING: Final = re.compile(rb"[\x08-\x0d\x20-\x7e]+")


class EscapeFilter:
    """Filter one stream of output. ``feed`` returns what may be shown now; ``flush`` the rest at the end."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._rest = 0
        self._state: Callable[[int], bytes] = self._ground

    def feed(self, data: bytes) -> bytes:
        """Return the next bytes for the terminal. The beginning of a sequence is held until it can be judged."""
        out = bytearray()
        at = 0
        while at < len(data):
            run = _PLAIN if self._state == self._ground else _STRING if self._state == self._string else None
            if run is not None and (plain := run.match(data, at)) is not None:
                out += plain[0]
                at = plain.end()
                continue
            out += self._state(data[at])
            at += 1
        return bytes(out)

    def flush(self) -> bytes:
        """Return what was held, at the end of the stream. A sequence that is cut there is taken out.

        Otherwise the next output on the terminal could finish it: that of another session, or of the agent's stderr.
        """
        in_text = not self._held or self._state == self._character
        return self._pass(b"") if in_text else self._drop(self._ground)

    # --- states: each takes one byte and returns what passes ---------------------------------------------------

    def _ground(self, byte: int) -> bytes:
        if byte == _ESC:
            return self._hold(byte, self._escape)
        if (introduced := self._introduced(byte)) is not None:
            return self._hold(byte, introduced)
        for first, last, rest in _LEADS:
            if first <= byte <= last:
                self._rest = rest
                return self._hold(byte, self._character)
        return bytes([byte])

    def _introduced(self, byte: int) -> Callable[[int], bytes] | None:
        """Return the state after an introducer of one byte."""
        return {_DCS8: self._dcs, _CSI8: self._csi, _OSC8: self._osc}.get(byte)

    def _character(self, byte: int) -> bytes:
        """Take the rest of a character that a chunk cut, or that is broken."""
        least = _SECOND.get(self._held[0], 0x80) if len(self._held) == 1 else 0x80
        if not least <= byte <= 0xBF:
            return self._pass(b"") + self._state(byte)
        if self._held == b"\xc2" and (introduced := self._introduced(byte)) is not None:
            return self._hold(byte, introduced)
        self._rest -= 1
        return self._hold(byte, self._character) if self._rest else self._pass(bytes([byte]))

    def _escape(self, byte: int) -> bytes:
        following = {0x50: self._dcs, 0x5B: self._csi, 0x5D: self._osc, 0x25: self._coding}.get(byte)
        if following is not None:
            return self._hold(byte, following)
        if byte == _ESC or byte >= 0x80:
            # A terminal may read the upper half as byte - 0x80. In a string, GNU screen hands the second ESC on alone.
            return self._drop(self._ground) + self._ground(byte)
        if (byte < 0x20 or byte == 0x7F) and byte not in (_CAN, _SUB):
            # The terminal obeys or ignores it, and the sequence goes on.
            return self._hold(byte, self._escape) if len(self._held) < _MOST else self._drop(self._ground)
        return self._pass(bytes([byte]))

    def _coding(self, byte: int) -> bytes:
        return self._pass(b"G") if byte == ord("G") else self._drop(self._ground) + self._ground(byte)

    def _csi(self, byte: int) -> bytes:
        if _breaks(byte):
            return self._broken(byte)
        if byte < 0x40 or byte == 0x7F:
            return self._hold(byte, self._csi) if len(self._held) < _MOST else self._drop(self._long_csi)
        number = self._number(after=b"[\x9b")
        asks = byte == ord("t") and number is not None and (number in _TITLES or number > _LARGEST)
        return self._drop(self._ground) if asks else self._pass(bytes([byte]))

    def _long_csi(self, byte: int) -> bytes:
        if _breaks(byte):
            self._state = self._ground
            return self._ground(byte)
        if 0x40 <= byte < 0x7F:
            self._state = self._ground
        return b""

    def _osc(self, byte: int) -> bytes:
        if byte == _ESC:
            return self._drop(self._ground) + self._ground(byte) if self._reaches() else self._hold(byte, self._osc_end)
        if _breaks(byte) and byte != _ST8:
            return self._broken(byte)
        ends = byte in (_BEL, _ST8)
        if not ends and (byte in b"0123456789 +-" or byte < 0x20 or byte == 0x7F):
            return self._hold(byte, self._osc) if len(self._held) < _MOST else self._drop(self._dropped)
        if self._reaches():
            return self._drop(self._ground if ends else self._dropped)
        # The number reaches nothing: the text passes, and is read for sequences as all else.
        return self._pass(b"") + self._ground(byte)

    def _osc_end(self, byte: int) -> bytes:
        """Take the byte after an ESC that ends a number: the sequence is whole, or it is none."""
        if byte == ord("\\"):
            return self._pass(b"\\")
        return self._drop(self._ground) + self._ground(_ESC) + self._state(byte)

    def _dcs(self, byte: int) -> bytes:
        if _breaks(byte):
            return self._broken(byte)
        if byte < 0x40 or byte == 0x7F:
            return self._hold(byte, self._dcs) if len(self._held) < _MOST else self._drop(self._dropped)
        if _DCS_PASSING.fullmatch(self._body(after=b"P\x90") + bytes([byte])):
            out = self._pass(bytes([byte]))
            self._state = self._string
            return out
        return self._drop(self._dropped)

    def _string(self, byte: int) -> bytes:
        """Pass the text of a DCS string. What is no text is left out, so that every terminal sees the same end."""
        return self._hold(byte, self._string_end) if byte == _ESC else b""

    def _string_end(self, byte: int) -> bytes:
        return self._pass(b"\\")

    def _dropped(self, byte: int) -> bytes:
        """Drop a text until the terminal would take it for ended."""
        if byte in (_BEL, _ST8):
            self._state = self._ground
        elif byte in (_ESC, _CAN, _SUB):
            self._state = self._ground
            return self._ground(byte)
        return b""

    # --- what becomes of the held bytes ------------------------------------------------------------------------

    def _hold(self, byte: int, state: Callable[[int], bytes]) -> bytes:
        self._held.append(byte)
        self._state = state
        return b""

    def _pass(self, more: bytes) -> bytes:
        out = bytes(self._held) + more
        self._held.clear()
        self._state = self._ground
        return out

    def _drop(self, state: Callable[[int], bytes]) -> bytes:
        self._held.clear()
        self._state = state
        return _CAN_BYTE

    def _broken(self, byte: int) -> bytes:
        """Take out a sequence that this byte breaks off: a multiplexer may hand its beginning on alone."""
        return self._drop(self._ground) + (b"" if byte in (_CAN, _SUB) else self._ground(byte))

    def _body(self, *, after: bytes) -> bytes:
        """Return the held sequence after its introducer, as a terminal reads it: controls inside do not count."""
        body = bytes(self._held)
        start = max(body.find(bytes([one])) for one in after) + 1
        return bytes(byte for byte in body[start:] if byte >= 0x20 and byte != 0x7F)

    def _number(self, *, after: bytes) -> int | None:
        """Return the first number of the held sequence."""
        found = re.match(rb"[0-9]+(?=[;:]|$)", self._body(after=after))
        return int(found[0]) if found is not None else None

    def _reaches(self) -> bool:
        """Whether the held OSC has a number that is taken out. A sign or a space may be read over, as by atoi(3)."""
        body = self._body(after=b"]\x9d")
        if body.strip(b"0123456789"):
            return True
        number = int(body or b"0")
        return number in _OSC_REACHING or number > _LARGEST


def _breaks(byte: int) -> bool:
    """Whether a terminal leaves a sequence at this byte. It may read the upper half as byte - 0x80."""
    return byte in (_ESC, _CAN, _SUB) or byte >= 0x80
