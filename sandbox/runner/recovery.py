"""Recover runs whose process is gone: end them, count their use, and remove their files, in this order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from policy import contract, errors
from sandbox.config import Config, trusted_binary
from sandbox.kernel.cgroup import cgroup
from sandbox.network import uplink
from sandbox.network.gate import cgroup as gate_cgroup
from sandbox.network.publish import places as publish_places
from sandbox.rundir.directory import abandoned, cgroups_of, network_of, published_of, remove
from sandbox.runner.limits import METER, Meter, was_begun


def recover(
    runs: Path,
    *,
    config: Config | None = None,
    hierarchies: cgroup.Hierarchies | None = None,
    used: Callable[[str, contract.Usage], None] = lambda run_id, usage: None,
    isolated: bool = False,
) -> list[str]:
    """Remove the cgroups and directories of runs whose process is gone. Return the ids of the removed runs.

    ``run_events.cut_off`` writes their ends into the log afterwards. ``used`` is called with their use, before the
    cgroups that counted it are removed. ``isolated`` says that this process is not in the host's network. Of a run that
    had a device there, everything else is then removed; the directory stays for a process that is in the host's
    network.

    Raises:
        errors.CovenantError: Raised when one cannot be ended or removed, and stays; the others are gone.
    """
    removed, failed = [], list[errors.CovenantError]()
    with abandoned(runs) as found:
        paths = []
        # First, before any step that may fail: no process watches the agents that still run.
        for path in found:
            try:
                leaf = cgroup.Leaf(hierarchies or cgroup.Hierarchies.read(), path.name)
                leaf.adopt(cgroups_of(path))
                leaf.kill()
                used(path.name, used_by(leaf, path))
                leaf.remove()
            except errors.CovenantError as e:
                failed.append(e)  # one that a hung disk keeps alive keeps no other
            else:
                paths.append(path)
        networked = {path: about for path in paths if (about := network_of(path)) is not None}
        # Before the first directory is removed: it alone says that something is left.
        if networked and not isolated:
            places = {path.name: uplink.noted(about) for path, about in networked.items()}
            uplink.recover(places, binary=trusted_binary((config or Config()).nft))
        for path in paths:
            if path in networked and isolated:
                continue
            publish_places.recover([one["to"] for one in published_of(path)])
            remove(path)
            removed.append(path.name)
    if failed:
        raise failed[0]
    return removed


def used_by(leaf: cgroup.Leaf, path: Path) -> contract.Usage:
    """Return the use of a run whose process is gone; ``path`` is its directory.

    Its duration was not seen and is not guessed from the clock. Use that was not counted is unknown too.
    """
    noted = path / METER
    if not was_begun(noted):
        return contract.NOTHING_USED  # it is written before the intent is given
    meter = Meter.of_one_that_was_killed(leaf, gate_cgroup.adopted_of(leaf), noted)
    return contract.Usage(meter.cpu_ms(), leaf.memory_peak_bytes(), None)
