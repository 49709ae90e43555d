"""Reference values that attestation compares with (RATS, RFC 9334)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sandbox.attest.network import Network
from sandbox.attest.workspace import WorkspaceReference
from sandbox.kernel.procfs import Name
from sandbox.kernel.runsc import debug_log
from sandbox.rootfs import erofs_image
from sandbox.rundir.directory import BUNDLE, ROOT_FILE
from sandbox.storage import json_cache

RECORD = "attest.json"
# The version of the record. A run that an earlier version of Covenant started has another.
_VERSION: Final = 5


class RootFile(Struct, frozen=True):
    """The EROFS file that has the root. ``line`` is its inode when the start opened it (erofs_image)."""

    device: int
    inode: int
    size: int
    digest: str
    line: str

    @classmethod
    def of(cls, file: erofs_image.ImageFile) -> RootFile:
        """Describe an open image that was checked since it was opened."""
        info = os.fstat(file.fd)
        return cls(info.st_dev, info.st_ino, info.st_size, file.digest, file.line.decode())

    def describe(self) -> str:
        """Return device, inode, size and digest in words."""
        device = f"{os.major(self.device)}:{os.minor(self.device)}"
        return f"EROFS file of sha256 {self.digest} (device {device}, inode {self.inode}, {self.size} bytes)"


class ReferenceValues(Struct, frozen=True):
    """Describe the sandbox that was made for one run.

    ``cgroup_files`` maps each controller to its directory, and ``memberships`` the same as /proc/PID/cgroup shows it.
    ``limits`` maps each file to the value that was written. ``mounts`` maps each place to the device and inode of the
    expected mount. ``granted`` maps each granted path to the host's mount id on which it was opened. ``tells_calls``
    says that runsc logs the calls that its filter refuses, and how the ``traced`` calls end. ``arguments`` replace
    the compiled ones: those of a self-test, or of an agent that has its intent in one. ``nice`` is the nice value that
    the run's shim started with. ``streams`` names the files behind the agent's descriptors 0 to 2 (attest.streams).
    ``root_file`` is the EROFS file that has the root; "/" is no mount then. ``volumes`` maps the place of each volume
    to its image. ``workspace`` is the workspace of the run.
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
    granted: Mapping[str, int] = msgspec.field(default_factory=dict)
    streams: tuple[str, ...] = ()
    root_file: RootFile | None = None
    volumes: Mapping[str, str] = msgspec.field(default_factory=dict)
    workspace: WorkspaceReference | None = None

    def write(self, directory: Path) -> None:
        """Leave it where ``read`` looks for it."""
        network = None if self.network is None else self.network.to_json()
        json_cache.write(directory / RECORD, {"version": _VERSION, **msgspec.to_builtins(self), "network": network})

    @classmethod
    def read(cls, directory: Path) -> ReferenceValues | None:
        """Read the record in the directory of a live run. Returns None where there is none yet."""
        found = json_cache.read(directory / RECORD)
        if found is None or found.pop("version", None) != _VERSION:
            return None
        runner, mounts, network = Name(**found.pop("runner")), found.pop("mounts"), found.pop("network")
        root_file, workspace = found.pop("root_file"), found.pop("workspace")
        return cls(
            runner=runner,
            mounts={place: (dev, ino) for place, (dev, ino) in mounts.items()},
            network=None if network is None else Network.from_json(network),
            arguments=tuple(found.pop("arguments")),
            traced=tuple(found.pop("traced")),
            streams=tuple(found.pop("streams")),
            root_file=None if root_file is None else RootFile(**root_file),
            workspace=None if workspace is None else WorkspaceReference.restored(workspace),
            **found,
        )

    @property
    def image(self) -> str:
        """Return the path of the EROFS file in the run's configuration. It is empty where the root is a directory."""
        return "" if self.root_file is None else f"{self.directory}/{BUNDLE}/{ROOT_FILE}"

    @property
    def places(self) -> dict[str, str]:
        """Return runsc's flags with this run's paths, and with the log of calls that its filter refuses."""
        places = {"--root": f"{self.directory}/root", "--pod-init-config": f"{self.directory}/trace/pod-init.json"}
        if self.tells_calls:
            # The last flag is runsc's own translation of the log for the sandbox.
            written = debug_log.flags(Path(self.directory) / "trace", self.traced)
            places |= {**written, "--debug-log-fd": "3"}
        return places
