"""Run the containment suite by itself: ``python -m tests.containment`` runs all of it and writes the pages.

Needs root and a machine with runsc; it makes the networks that it needs. The exit status is 1 when a probe got out, or
when a control fails to show its probe's effect. The pages are then left as they were.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.kernel import hostile_combinations as combinations
from tests.kernel import hostile_page as page
from tests.kernel import hostile_table as table
from tests.kernel import test_hostile_controls as controls
from tests.kernel.world import World


def main() -> int:
    """Everything, one part after the other, each told as soon as it is known."""
    with tempfile.TemporaryDirectory(prefix="containment-") as scratch:
        base = Path(scratch)
        wrong = [*_network(base / "network"), *_sandbox(base / "sandbox")]
    if wrong:
        print("\n".join(["", "not as the tables promise:", *wrong]), file=sys.stderr)
        return 1
    for name, text in page.pages().items():
        (page.DOCS / name).write_text(text, encoding="utf-8")
        print("\n" + text)
        print(f"written: docs/{name}")
    return 0


def _network(base: Path) -> list[str]:
    base.mkdir()
    with combinations.opened(base) as suite:
        wrong = []
        for package in combinations.PACKAGES:
            wrong += _told(f"network: control of {package}", suite.control(package))
        for one in combinations.COMBINATIONS:
            wrong += _told(f"network: {one.name}", suite.covenant(one))
        return wrong + _told("network: walls", suite.walls())


def _sandbox(base: Path) -> list[str]:
    base.mkdir()
    (granted := base / "granted").mkdir()
    probes, _ = table.load()
    free = controls.answers(granted)
    judged = ((probe.id, table.wrong_in_plain(probe, free[probe.id])) for probe in probes)
    wrong = _told("sandbox: control", {name: text for name, text in judged if text is not None})
    world = World(base)
    for package in sorted({probe.package for probe in probes}):
        wrong += _told(f"sandbox: {package}", _package(world, package, [p for p in probes if p.package == package]))
    return wrong


def _package(world: World, package: str, probes: list[table.Probe]) -> Mapping[str, str]:
    """Return the fault of each faulty probe of a package under Covenant."""
    path = world.sign(world.copy(f"hostile/{package}"))
    together = [probe.id for probe in probes if not probe.alone and probe.limit is None]
    answer = world.run(path, table.batch(together))
    if answer.result is None:
        return {"the run": str(answer.error)}
    rows, found = table.rows(answer.result.text), {}
    for probe in probes:
        if probe.limit is not None:
            ended = world.run(path, probe.id).error
            text = None if ended is not None and ended.code == probe.limit else f"{probe.id}: {ended}"
        else:
            if probe.id not in rows:
                alone = world.run(path, probe.id).result
                rows |= {} if alone is None else table.rows(alone.text)
            text = table.wrong_under_covenant(probe, rows[probe.id]) if probe.id in rows else f"{probe.id}: no answer"
        if text is not None:
            found[probe.id] = text
    return found


def _told(part: str, wrong: Mapping[str, str]) -> list[str]:
    print(f"{part}: {'as it should be' if not wrong else f'{len(wrong)} wrong'}", flush=True)
    return [f"  {part}: {name}: {text}" for name, text in wrong.items()]


if __name__ == "__main__":
    sys.exit(main())
