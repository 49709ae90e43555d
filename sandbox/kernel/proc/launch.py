"""The steps between a fork and an exec, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct


class Attach(Struct, frozen=True):
    """Move the detached mount ``fd`` to ``target`` in the child's namespace."""

    fd: int
    target: str

    def describe(self) -> str:
        """The operation in words."""
        return f"attach a detached mount at {self.target}"


class Launch(Struct, frozen=True):
    """Everything that the child does before execve, in order: cgroups, session, network, mounts, stdio, ``prepare``,
    ``filter``.

    ``join_files`` are joined first, so that no later step is outside the limits. ``network`` is a descriptor of the
    network namespace that it enters, None for the caller's own, or for a new one with ``own_network``; ``covered`` are
    directories that it sees empty. ``prepare`` is for what a backend adds (identity, filter); it must not return with
    rights that the program may not have. ``keep`` are descriptors above 2 that the program is given by their numbers
    here. ``filter`` is a seccomp filter that the program and all that it starts are under, an array of struct
    sock_filter; loading it takes CAP_SYS_ADMIN or a ``prepare`` that sets no-new-privs.
    """

    program: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    join_files: Sequence[str] = ()
    mounts: Sequence[Attach] = ()
    network: int | None = None
    covered: Sequence[str] = ()
    prepare: Callable[[], None] | None = None
    directory: str = "/"
    keep: Sequence[int] = ()
    own_network: bool = False
    filter: bytes = b""
