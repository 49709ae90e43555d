"""Reference values that attestation compares with (RATS, RFC 9334)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from sandbox.attest.network import Network
from sandbox.kernel.procfs import Name
from sandbox.kernel.runsc import debug_log
from sandbox.storage import json_cache

RECORD = "attest.json"
# The version of the record. A run that an earlier version of Covenant started has another.
_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class ReferenceValues:
    """Describe the sandbox that was made for one run.

    ``cgroup_files`` maps each controller to its directory, and ``memberships`` the same as /proc/PID/cgroup shows it.
    ``limits`` maps each file to the value that was written. ``mounts`` maps each place to the device and inode of the
    expected mount. ``granted`` maps each granted path to the host's mount id on which it was opened. ``tells_calls``
    says that runsc logs the calls that its filter refuses, and how the ``traced`` calls end. ``arguments`` are those of
    a self-test; a run of an agent has none. ``nice`` is the nice value that the run's shim started with.
    """

    run_id: str
    agent_id: str
    policy_digest: str
    uid: int
    runner: Name
    directory: str
    cgroup_version: int
    cgroup_files: Mapping[str, str]
    memberships: Mapping[str, str]
    limits: Mapping[str, str]
    mounts: Mapping[str, tuple[int, int]]
    package: str
    network: Network | None = None
    tells_calls: bool = True
    traced: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    nice: int = 0
    granted: Mapping[str, int] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Leave it where ``read`` looks for it."""
        network = None if self.network is None else self.network.to_json()
        json_cache.write(directory / RECORD, {"version": _VERSION, **asdict(self), "network": network})

    @classmethod
    def read(cls, directory: Path) -> ReferenceValues | None:
        """Read the record in the directory of a live run. Returns None where there is none yet."""
        found = json_cache.read(directory / RECORD)
        if found is None or found.pop("version", None) != _VERSION:
            return None
        runner, mounts, network = Name(**found.pop("runner")), found.pop("mounts"), found.pop("network")
        return cls(
            runner=runner,
            mounts={place: (dev, ino) for place, (dev, ino) in mounts.items()},
            network=None if network is None else Network.from_json(network),
            arguments=tuple(found.pop("arguments")),
            traced=tuple(found.pop("traced")),
            **found,
        )

    @property
    def places(self) -> dict[str, str]:
        """Return runsc's flags with this run's paths, and with the log of calls that its filter refuses."""
        places = {"--root": f"{self.directory}/root", "--pod-init-config": f"{self.directory}/trace/pod-init.json"}
        if self.tells_calls:
            # The last flag is runsc's own translation of the log for the sandbox.
            written = debug_log.flags(Path(self.directory) / "trace", self.traced)
            places |= {**written, "--debug-log-fd": "3"}
        return places
