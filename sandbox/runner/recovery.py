"""What runs left whose process is gone: it is ended, counted, and taken away, in this order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from policy import contract, errors
from sandbox.config import Config, trusted_binary
from sandbox.kernel.cgroup import cgroup
from sandbox.network import uplink
from sandbox.network.gate import cgroup as gate_cgroup
from sandbox.rundir.directory import abandoned, cgroups_of, network_of, remove
from sandbox.runner.limits import METER, Meter, was_begun


def recover(
    runs: Path,
    *,
    config: Config | None = None,
    hierarchies: cgroup.Hierarchies | None = None,
    used: Callable[[str, contract.Usage], None] = lambda run_id, usage: None,
    isolated: bool = False,
) -> list[str]:
    """Remove what runs left whose process is gone: their cgroups with everything in them, then their directories. The
    ids of those that are removed.

    What the log says of them is for ``run_events.cut_off``, afterwards; ``used`` is told what they had used, before it
    is taken away with what counted it. ``isolated`` says that this process is not in the host's network: of a run that
    had a part of that, all else is taken away, and the directory that says so stays for whoever is.

    Raises:
        errors.CovenantError: one cannot be ended or taken away, and stays; the others are gone.
    """
    removed, failed = [], list[errors.CovenantError]()
    with abandoned(runs) as found:
        paths = []
        # First of all, and whatever of the rest fails: what still runs has nobody who watches it.
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
        # Before the first directory goes: it is what says that there is something to take away.
        if networked and not isolated:
            places = {path.name: uplink.noted(about) for path, about in networked.items()}
            uplink.recover(places, binary=trusted_binary((config or Config()).nft))
        for path in paths:
            if path in networked and isolated:
                continue
            remove(path)
            removed.append(path.name)
    if failed:
        raise failed[0]
    return removed


def used_by(leaf: cgroup.Leaf, path: Path) -> contract.Usage:
    """What a run had used whose process is gone; ``path`` is its directory. For how long nobody saw, and it is not
    guessed from the clock: of one that had its intent that is not known, and neither is what was not counted."""
    noted = path / METER
    if not was_begun(noted):
        return contract.NOTHING_USED  # it is written before the intent is given
    meter = Meter.of_one_that_was_killed(leaf, gate_cgroup.adopted_of(leaf), noted)
    return contract.Usage(meter.cpu_ms(), leaf.memory_peak_bytes(), None)
