"""The report of the year: one page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tests.year.acts import TIMES, Year
from tests.year.invariants import Finding, Sample
from tests.year.machine import DISK_MB


def page(
    made: Year, samples: Sequence[Sample], findings: Sequence[Finding], *, days: int, seed: int, seconds: float
) -> str:
    """Return the whole page."""
    done = f"{made.intents.answered} intents answered, {len(made.wrong)} findings"
    lines = [
        "# A simulated year",
        "",
        f"{days} days in {seconds / 60:.1f} minutes (seed {seed}): {done}.",
        "",
        "| at the end | found | holds |",
        "|---|---|---|",
        *(f"| {one.name} | {one.found} | {'yes' if one.holds else '**no**'} |" for one in findings),
        "",
        "| checked every day | times |",
        "|---|---|",
        *(f"| {what} | {count} |" for what, count in sorted(made.checks.items())),
        "",
        "| act | times |",
        "|---|---|",
        *(f"| {act.__name__.replace('_', ' ')} | {made.counts.get(act.__name__, 0)} |" for act in TIMES),
        "",
        "| day | daemon MB | descriptors | supervisor MB | descriptors | daemon's disk MB | supervisor's disk MB |",
        "|---|---|---|---|---|---|---|",
        *(_line(one) for one in samples[:: max(1, len(samples) // 12)]),
        "",
    ]
    if made.wrong:
        lines += ["Findings:", "", *(f"- {one[:1000]}" for one in made.wrong[:100]), ""]
    return "\n".join(lines)


def _line(one: Sample) -> str:
    disks = " | ".join(f"{one.disks_mb[name]:.0f}" for name in DISK_MB)
    return (
        f"| {one.day} | {one.daemon_mb:.0f} | {one.daemon_files} | {one.supervisor_mb:.0f} | {one.supervisor_files} | "
        f"{disks} |"
    )
