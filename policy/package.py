"""An agent package as bytes: which names, counts and sizes it may have, and its digest.

Pure. ``sandbox.storage.package_reader.read`` makes one from a directory. All later steps take the bytes of
``Package.files``: hash, verify, parse and run. So no second look at the disk can show other bytes.

Directories are not part of a package: they exist as far as a file lies in them. Symbolic links are part of it by their
text (``policy.symlinks``, ADR 0150).
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from policy import errors, symlinks

MANIFEST_NAME = "agent.toml"
ENVELOPE_NAME = "agent.dsse.json"

MAX_FILES = 10_000
MAX_BYTES = 256 * 1024 * 1024
MAX_ENVELOPE_BYTES = 8 * 1024 * 1024
# Of a manifest that is run, and of one by which a package is found among others.
MANIFEST_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1024
# What the digest of a link's text begins with: no digest of a file is spelled so.
LINK_PREFIX = "link:"

# Controls, formats (bidi, zero width), surrogates (a name that is not UTF-8), private use and unassigned (their
# display is undefined), separators and spaces other than the ordinary one: two names that look the same, or a
# name that steers a terminal, have no place in a signed list.
_REFUSED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
# Marks, letters and symbols that show nothing: Default_Ignorable_Code_Point of Unicode 15 beyond the categories
# above (DerivedCoreProperties.txt), and the blank of braille.
INVISIBLE = frozenset(
    map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x2800, 0x3164, 0xFFA0))
) | frozenset(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))

# What editors, interpreters and file managers leave behind. It is not skipped (what lies in a package is
# signed and runs), so `sign` refuses it by name: a stale .pyc would run instead of the source that was read.
_DROPPING_NAMES = frozenset({"__pycache__", ".git", ".hg", ".svn", ".DS_Store", ".idea", ".vscode", "Thumbs.db"})
_DROPPING_ENDS = (".pyc", ".pyo", ".swp", ".swo", "~", ".orig", ".rej", ".tmp")


@dataclass(frozen=True, slots=True)
class Package:
    """The files of one package, each by its path relative to the package, its envelope if it has one, and its links.

    ``links`` maps the path of each symbolic link to its text. ``digests`` maps each path to the hex SHA-256 of its
    bytes, or of a link to ``link:`` and that of its text; ``digest`` is the hex SHA-256 over the sorted ``sha256sum``
    lines of all of them but the envelope. Both are computed here and cannot be given.

    Raises:
        errors.PackageError: a name, a link, the number of files, or the size is refused, or there is no manifest.
    """

    files: Mapping[str, bytes]
    envelope: bytes | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        files = {path: bytes(self.files[path]) for path in sorted(self.files)}
        links = {path: self.links[path] for path in sorted(self.links)}
        check_paths((*files, *links))
        check_size(files=len(files) + len(links), total_bytes=sum(map(len, files.values())))
        check_envelope_size(len(self.envelope or b""))
        for text in links.values():
            _check_characters(text, "link text")
        symlinks.check_package(links, files)
        if MANIFEST_NAME not in files:
            raise errors.PackageError(
                f"the package has no `{MANIFEST_NAME}`", hint="a package is a directory with an agent.toml"
            )
        digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
        for path, text in links.items():
            digests[path] = LINK_PREFIX + hashlib.sha256(text.encode()).hexdigest()
        object.__setattr__(self, "files", MappingProxyType(files))
        object.__setattr__(self, "links", MappingProxyType(links))
        object.__setattr__(self, "digests", MappingProxyType(digests))
        object.__setattr__(self, "digest", listing_digest(digests))

    @property
    def manifest(self) -> bytes:
        """The bytes of ``agent.toml``."""
        return self.files[MANIFEST_NAME]

    def with_envelope(self, envelope: bytes | None) -> Package:
        """The same files under another envelope."""
        return Package(self.files, envelope, self.links)

    def with_manifest(self, manifest: bytes) -> Package:
        """The same files with another manifest, without an envelope."""
        return Package({**self.files, MANIFEST_NAME: manifest}, None, self.links)

    def file_at(self, path: str) -> str | None:
        """Return the file that a plain path of the package leads to; None where it leads to none."""
        if path in self.files:
            return path
        if not self.links or any(part in ("", ".", "..") for part in path.split("/")):
            return None
        found = symlinks.follow_in_package(path, self.links)
        return found if found in self.files else None


def listing_digest(digests: Mapping[str, str]) -> str:
    """Hex SHA-256 over ``<sha256>  <path>`` lines in byte order of the paths, as ``sha256sum`` prints them.

    A link's line begins with ``link:``, and no path has a line break: no link is listed as a file would be.
    """
    # Code point order of str is the byte order of UTF-8.
    listing = "".join(f"{digests[path]}  {path}\n" for path in sorted(digests))
    return hashlib.sha256(listing.encode()).hexdigest()


_LESS = "take out what the agent does not need, or put dependencies into a layer: covenant layer build"
_RENAME = "give it another name, or take it out of the package"


def check_size(*, files: int, total_bytes: int) -> None:
    """Refuse a package of too many files or bytes; the reader asks before it reads.

    Raises:
        errors.PackageError: over ``MAX_FILES`` or ``MAX_BYTES``.
    """
    if files > MAX_FILES:
        raise errors.PackageError(f"the package has more than {MAX_FILES} files", hint=_LESS)
    if total_bytes > MAX_BYTES:
        raise errors.PackageError(f"the package is larger than {MAX_BYTES // (1024 * 1024)} MiB", hint=_LESS)


def check_envelope_size(size: int, *, hint: str = "remove it, then sign the package again") -> None:
    """Refuse an envelope larger than ``MAX_ENVELOPE_BYTES``. The fix is of one that was read.

    Raises:
        errors.PackageError: it is.
    """
    if size > MAX_ENVELOPE_BYTES:
        raise errors.PackageError(
            f"`{ENVELOPE_NAME}` is larger than {MAX_ENVELOPE_BYTES // (1024 * 1024)} MiB",
            hint=hint,
            where=ENVELOPE_NAME,
        )


def check_path(path: str) -> None:
    """Refuse a path that is not the one plain, relative, printable spelling of a file below the package.

    Raises:
        errors.PackageError: empty, absolute, with ``.`` or ``..`` or an empty component, a control, format,
            surrogate or invisible character, too long or too deep, or the name of the envelope.
    """
    size = _check_characters(path, "file name")
    parts = path.split("/")
    if path.startswith("/"):
        raise errors.PackageError(f"the path `{_shown(path)}` is absolute")
    if any(part in ("", ".", "..") for part in parts):
        raise errors.PackageError(f"the path `{_shown(path)}` is not a plain relative path")
    if len(parts) > MAX_DEPTH:
        raise errors.PackageError(f"the path `{_shown(path)}` is deeper than {MAX_DEPTH} levels", hint=_RENAME)
    if size > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise errors.PackageError(f"the path `{_shown(path)}` is too long", hint=_RENAME)
    if path == ENVELOPE_NAME:
        raise errors.PackageError(f"`{ENVELOPE_NAME}` is the envelope and cannot be one of the signed files")


def _check_characters(path: str, kind: str) -> int:
    """Return the size of a path in bytes, unless it has a character that is not shown as it is."""
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise errors.PackageError(f"the {kind} `{_shown(path)}` is not UTF-8", hint=_RENAME) from None
    if not path.isascii() or not path.isprintable():
        for ch in path:
            if ch != " " and (ch in INVISIBLE or unicodedata.category(ch) in _REFUSED_CATEGORIES):
                message = f"the {kind} `{_shown(path)}` holds the character U+{ord(ch):04X}"
                raise errors.PackageError(message, hint=_RENAME)
    return size


# A directory's entries by their folded names: the name as written, and its own entries if it is a directory.
_Tree = dict[str, "tuple[str, _Tree | None]"]


def check_paths(paths: Iterable[str]) -> None:
    """Check each path, and that no two of them meet on a file system that folds case or Unicode form.

    Directories count too: ``Lib/a`` and ``lib/b`` would share a directory on one machine and not on another.

    Raises:
        errors.PackageError: as ``check_path``, or two names collide, or a file is also a directory.
    """
    tree: _Tree = {_fold(ENVELOPE_NAME): (ENVELOPE_NAME, None)}
    for path in paths:
        check_path(path)
        *directories, name = path.split("/")
        node = tree
        for part in directories:
            below = _enter(node, part, {}, path)
            if below is None:
                raise errors.PackageError(f"`{part}` of `{path}` is both a file and a directory")
            node = below
        if _enter(node, name, None, path) is not None:
            raise errors.PackageError(f"`{path}` is both a file and a directory")


def _enter(node: _Tree, name: str, new: _Tree | None, path: str) -> _Tree | None:
    """Return the entry under a name of one directory; ``new`` is put there when it has none."""
    known, below = node.setdefault(_fold(name), (name, new))
    if known != name:
        message = f"`{known}` and `{name}` of `{path}` differ only in case or Unicode form"
        raise errors.PackageError(message, hint=_RENAME)
    return below


def droppings(paths: Iterable[str]) -> tuple[str, ...]:
    """The paths that an editor, interpreter, version control or file manager left behind."""
    return tuple(
        path
        for path in paths
        if any(part in _DROPPING_NAMES or part.endswith(_DROPPING_ENDS) for part in path.split("/"))
    )


def _fold(name: str) -> str:
    """One spelling for all names that some file system takes for the same: Unicode's toNFKC_Casefold."""
    if name.isascii():
        return name.lower()
    once = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", name).casefold())
    return unicodedata.normalize("NFKC", once.casefold())


def _shown(path: str) -> str:
    """A path for a message: its start, with everything that is not printable ASCII escaped."""
    start = path if len(path) <= 128 else path[:128] + "..."
    return start.encode("unicode_escape").decode("ascii")
