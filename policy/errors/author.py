"""Errors that the author of the package must act on."""

from __future__ import annotations

from typing import Any

from policy.errors.base import Actor, CovenantError


class AuthorError(CovenantError):
    """The package or its manifest has to be changed."""

    actor = Actor.AUTHOR


class PackageError(AuthorError):
    """The package directory contains a refused entry: a link out of it, a device, a bad name, or too much data."""

    code = "package_invalid"


class ManifestError(AuthorError):
    """The manifest cannot be accepted as it is written."""

    code = "manifest_invalid"

    def to_json(self) -> dict[str, Any]:
        """The error document, with every finding of the manifest in ``errors``, in the order of the file."""
        return {**super().to_json(), "errors": list(self.details.get("errors", ()))}


class ManifestSyntaxError(ManifestError):
    """The manifest is not acceptable TOML: bytes, size, nesting, duplicate keys or grammar."""

    code = "manifest_syntax"


class ToolsError(ManifestError):
    """The tool manifest (tools.json), or what ``tools pin`` recorded of it, cannot be accepted as it is written."""

    code = "tools_invalid"


class ImportSourceError(AuthorError):
    """The configuration of another tool cannot be read as its format, or no manifest grants at most as much."""

    code = "import_refused"


class UnknownSyscallError(ManifestError):
    """The manifest names a system call that no supported architecture has."""

    code = "unknown_syscall"


class ProgramError(AuthorError):
    """A program of the package, or a granted one, is a script, for another machine, or lacks a library."""

    code = "program_refused"


class GrantedPathError(AuthorError):
    """A granted host path is missing, leads through a symlink, has a wrong owner, or may never be granted."""

    code = "path_refused"
