"""Facts beside the grants: the package and its entry, the host's runtime and programs, the runsc binary.

None of them is a grant, so comparing grants cannot show a fault in them. The compiler has these facts and hands them to
the proof. For artefacts in a directory there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policy import errors
from policy.decompile.documents import shown
from policy.decompile.read import Decompiled
from policy.host import Closure, HostFacts
from policy.manifest.agent import Manifest


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that artefacts must name. Digests are hex SHA-256.

    ``closures`` maps the runtime (a word) and each granted program (a path) to its closure; ``kinds`` each granted
    path to ``file`` or ``dir``; ``args`` starts the agent; by ``secret_files`` what is granted of secrets is files.
    ``stack`` is whose network stack the operator has agents with a network use.
    """

    arch: str
    package_digest: str
    args: tuple[str, ...]
    runtime: str
    runsc: tuple[str, str] | None
    closures: Mapping[str, Closure] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    rooms: Mapping[str, int] = field(default_factory=dict)
    secret_files: bool = False
    stack: str = "sandbox"

    @classmethod
    def of(cls, manifest: Manifest, host: HostFacts, package_digest: str) -> Facts:
        """The facts of a manifest on a host."""
        agent = manifest.agent
        runtime = host.runtimes.get(agent.runtime)
        interpreter = () if runtime is None or agent.runtime == "rust-bin" else (runtime.entry,)
        return cls(
            host.arch,
            package_digest,
            (*interpreter, agent.entry) if interpreter else (f"/workspace/{agent.entry}",),
            agent.runtime,
            None if host.runsc is None else (host.runsc.version, host.runsc.sha256),
            {**host.runtimes, **host.executables},
            {path: found.kind for path, found in host.granted.items()},
            {path: found.room_mb for path, found in host.granted.items()},
            manifest.permissions.credentials.files,
            host.network.stack,
        )


def check(facts: Facts, found: Decompiled, package_digest: str) -> None:
    """Hold what was found to the facts. ``package_digest`` is the one that effective.json names.

    Raises:
        errors.ProofError: something else would be started, or shown, than what the facts say.
    """
    seen = found.seen
    pairs: list[tuple[str, object, object]] = [
        ("arch", found.arch, facts.arch),
        ("package", package_digest, facts.package_digest),
        ("arguments", list(found.args), list(facts.args)),
        ("runtime", seen.runtime.name, facts.runtime),
        ("secrets as files", seen.secrets, facts.secret_files and bool(found.grants.credentials.listing())),
        ("network stack", found.runsc.stack, facts.stack if found.reached.mode != "off" else ""),
        ("runsc", [found.runsc.version, found.runsc.sha256], None if facts.runsc is None else list(facts.runsc)),
    ]
    for closure in (seen.runtime, *seen.programs):
        known = facts.closures.get(closure.name)
        pairs.append((f"files of {closure.name}", closure.digest, known.digest if known else None))
        pairs.append((f"program of {closure.name}", closure.entry, known.entry if known else None))
        if closure.sha256:
            pairs.append((f"content of {closure.name}", closure.sha256, _content(known)))
    pairs += [(f"kind of {place}", kind, facts.kinds.get(place)) for place, kind in seen.granted.items()]
    pairs += [(f"MiB at {place}", mb, facts.rooms.get(place)) for place, mb in seen.rooms.items()]
    for name, here, expected in pairs:
        if here != expected:
            raise errors.ProofError(
                f"the artefacts name {shown(here)} as {name}, and not {shown(expected)}", domain="facts"
            )


def _content(closure: Closure | None) -> str | None:
    """The digest of the file that a closure starts."""
    files = () if closure is None else closure.files
    return next((file.sha256 for file in files if closure and file.path == closure.entry), None)
