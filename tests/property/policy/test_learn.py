"""Proposals are never beyond the ceiling, never sensitive or never granted, stable, and each has evidence."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from policy import data
from policy.learn import presets
from policy.learn.ceiling import Ceiling, Directory, HostPlace, below
from policy.learn.observed import Observed, SeenAccess
from policy.learn.propose import propose

NAMES = ("a", "b", ".ssh", ".env", "etc", "shadow", "srv", "key.pem", "root", "lib", "proc", "tmp", "work")
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
ACCESSES = st.builds(
    SeenAccess,
    st.sampled_from(("open", "exec", "load")),
    PATHS,
    st.sampled_from(("sh", "init", "python3")),
    st.integers(1, 10_000),
    st.sampled_from((0, 0, 2, 13)),
    st.booleans(),
    st.booleans(),
)
NEVER = data.never_grantable().trees


def facts(accesses: list[SeenAccess], ceiling: Ceiling) -> dict[str, Directory]:
    """Return true facts about a host that has just these paths."""
    paths = {host for one in accesses if (host := ceiling.host_path(one.path)) is not None}
    folders = {path[:at] or "/" for path in paths for at, sign in enumerate(path) if sign == "/"} | paths
    return {
        folder: Directory(
            len({path for path in paths if path.rpartition("/")[0] == folder}),
            any(presets.is_sensitive(path) for path in paths if below(path, folder)) or any(
                below(one, folder) for one in NEVER
            ),
        )
        for folder in folders
    }  # fmt: skip


def observed(accesses: list[SeenAccess]) -> Observed:
    made = Observed()
    for one in accesses:
        made.saw(one)
    return made


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[SeenAccess], Ceiling]:
    accesses = draw(st.lists(ACCESSES, max_size=30))
    ceiling = Ceiling(
        reads=tuple(draw(st.sets(PATHS, max_size=3))),
        volumes=tuple(draw(st.sets(PATHS, max_size=1))),
        workspace=draw(st.sampled_from((None, HostPlace("/srv/a", "/work"), HostPlace("/srv/a", "/srv/a")))),
        programs=draw(st.booleans()),
        reach=draw(st.booleans()),
        never=NEVER,
    )
    return accesses, Ceiling(
        reads=ceiling.reads,
        volumes=ceiling.volumes,
        workspace=ceiling.workspace,
        programs=ceiling.programs,
        reach=ceiling.reach,
        never=NEVER,
        directories=facts(accesses, ceiling),
    )


@example(([SeenAccess("open", "/etc", "sh", 1)], Ceiling(reads=("/etc",), never=NEVER)))
@given(cases())
def test_proposal_is_within_ceiling(case: tuple[list[SeenAccess], Ceiling]) -> None:
    accesses, ceiling = case
    found = propose(observed(accesses), ceiling, {})
    for line in found.reads:
        assert ceiling.root_of(line.value) is not None
        assert not any(one != "/" and (below(line.value, one) or below(one, line.value)) for one in NEVER)
        assert line.value in ceiling.reads or not presets.is_sensitive(line.value)
    opened = {ceiling.host_path(one.path) for one in accesses if not one.errno}
    for path in opened:
        if path is not None and presets.is_sensitive(path) and path not in ceiling.reads:
            assert not any(below(path, line.value) for line in found.reads)
    assert found.workspace is None or ceiling.workspace is not None
    assert {line.value for line in found.volumes} <= set(ceiling.volumes)
    assert not found.programs or ceiling.programs
    assert not found.hosts
    for line in found.lines:
        assert line.count > 0
        assert line.first_ns > 0
        assert line.paths > 0


@given(cases(), st.randoms())
def test_proposal_does_not_hang_on_order(case: tuple[list[SeenAccess], Ceiling], random: st.DataObject) -> None:
    accesses, ceiling = case
    other = list(accesses)
    random.shuffle(other)  # type: ignore[attr-defined]
    mine, theirs = (propose(observed(one), ceiling, {}) for one in (accesses, other))
    assert [(line.key, line.value, line.count) for line in mine.lines] == [
        (line.key, line.value, line.count) for line in theirs.lines
    ]


@given(cases())
def test_learning_again_proposes_the_same(case: tuple[list[SeenAccess], Ceiling]) -> None:
    accesses, ceiling = case
    first = propose(observed(accesses), ceiling, {})
    if first.workspace is None:
        reads = tuple(line.value for line in first.reads)
        # The learnt run has these files at their own place.
        moved = []
        for one in accesses:
            host = ceiling.host_path(one.path)
            moved.append(one if host is None else structs.replace(one, path=host, writes=False))
        again = Ceiling(reads=reads, programs=ceiling.programs, never=NEVER, directories=ceiling.directories)
        second = propose(observed(moved), again, {})
        assert [line.value for line in second.reads] == list(reads)
