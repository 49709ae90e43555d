"""Which packages of a home are agents, which are listed with an error, and how a change is found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from covenant.runtime import packages
from covenant.runtime.agents import Agents, Change
from policy import errors
from policy.package import MANIFEST_BYTES
from sandbox.storage import other_mounts
from tests import runtime_kit

pytestmark = pytest.mark.anyio


async def _loaded(home: Path) -> Agents:
    agents = Agents(home)
    await agents.reload()
    return agents


async def test_home_without_agents_has_none(home: Path) -> None:
    agents = await _loaded(home)
    assert (agents.cards(), agents.listing()) == ((), ())
    with pytest.raises(errors.NoAgentError):
        agents.find("hello")


async def test_cards_are_sorted_by_id_and_not_by_directory(home: Path) -> None:
    runtime_kit.package(home, "b", directory="1")
    runtime_kit.package(home, "a", directory="2")
    agents = await _loaded(home)
    assert [card.id for card in agents.cards()] == ["a", "b"]
    assert agents.find("b").directory == home / "agents" / "1"


async def test_files_and_directories_without_manifest_are_no_packages(home: Path) -> None:
    runtime_kit.package(home, "a")
    (home / "agents" / "flat.toml").write_text(runtime_kit.manifest("flat"))
    (home / "agents" / "empty").mkdir()
    os.mkfifo(home / "agents" / "fifo")
    assert [one.directory for one in (await _loaded(home)).listing()] == ["a"]


async def test_bad_package_is_listed_with_its_error_and_stops_nobody(home: Path) -> None:
    runtime_kit.package(home, "good")
    (runtime_kit.package(home, "bad") / "agent.toml").write_text("[agent\n")
    (runtime_kit.package(home, "wrong") / "agent.toml").write_text(runtime_kit.manifest("no@id"))
    large = runtime_kit.package(home, "large") / "agent.toml"
    large.write_text(large.read_text() + "#" * MANIFEST_BYTES)
    agents = await _loaded(home)
    assert [card.id for card in agents.cards()] == ["good"]
    found = {one.directory: one.error for one in agents.listing()}
    assert isinstance(found["bad"], errors.ManifestError)
    assert isinstance(found["wrong"], errors.ManifestError)
    assert isinstance(found["large"], errors.PackageError)
    assert found["good"] is None


async def test_longest_manifest_that_runs_is_listed(home: Path) -> None:
    path = runtime_kit.package(home, "long") / "agent.toml"
    written = path.read_text()
    path.write_text(written + (f"{'#' * 99}\n" * (MANIFEST_BYTES // 100))[: MANIFEST_BYTES - len(written)])
    agents = await _loaded(home)
    assert [card.id for card in agents.cards()] == ["long"]


async def test_no_name_is_followed_out_of_place(home: Path) -> None:
    outside = runtime_kit.package(home / "elsewhere", "outside")
    (home / "agents").mkdir()
    (home / "agents" / "link").symlink_to(outside)
    inside = home / "agents" / "inside"
    inside.mkdir()
    (inside / "agent.toml").symlink_to(outside / "agent.toml")
    fifo = home / "agents" / "fifo"
    fifo.mkdir()
    os.mkfifo(fifo / "agent.toml")
    agents = await _loaded(home)
    assert agents.cards() == ()
    reasons = {one.directory: str(one.error) for one in agents.listing()}
    assert set(reasons) == {"link", "inside", "fifo"}
    assert "symlink" in reasons["link"]
    assert "symlink" in reasons["inside"]
    assert "no plain file" in reasons["fifo"]


async def test_name_no_text_is_listed_as_one(home: Path) -> None:
    (runtime_kit.package(home, "a") / "agent.toml").unlink()
    place = os.fsencode(home / "agents") + b"/\xff\xfe"
    os.mkdir(place)
    Path(os.fsdecode(place), "agent.toml").write_text("[agent\n")
    (listed,) = (await _loaded(home)).listing()
    assert listed.directory == "\\xff\\xfe"
    assert listed.error is not None
    assert "xff" not in str(listed.error) or str(listed.error).isprintable()


async def test_of_two_packages_with_one_id_neither_is_routed_to(home: Path) -> None:
    runtime_kit.package(home, "twin", directory="one")
    runtime_kit.package(home, "twin", directory="two")
    runtime_kit.package(home, "other")
    agents = await _loaded(home)
    assert [card.id for card in agents.cards()] == ["other"]
    assert [type(one.error) for one in agents.listing()] == [
        type(None),
        errors.AgentIdTakenError,
        errors.AgentIdTakenError,
    ]
    with pytest.raises(errors.AgentIdTakenError, match="`two`"):
        agents.find("twin")
    (home / "agents" / "two" / "agent.toml").unlink()
    assert (await agents.reload()).added == ("twin",)
    assert agents.find("twin").directory.name == "one"


async def test_what_else_lies_there_keeps_nobody_from_being_found(home: Path) -> None:
    runtime_kit.package(home, "z", directory="zz")
    for number in range(packages.MOST_PACKAGES + 10):
        (home / "agents" / f"empty-{number}").mkdir()
    for number in range(packages.MOST_REFUSED + 10):
        (home / "agents" / f"link-{number:04}").symlink_to("nowhere")
    agents = await _loaded(home)
    assert [card.id for card in agents.cards()] == ["z"]
    refused = {one.directory: str(one.error) for one in agents.listing() if one.error is not None}
    assert len(refused) == packages.MOST_REFUSED + 1
    assert "holds 10 more that cannot be used" in refused["."]


async def test_more_packages_than_are_known_are_one_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "MOST_PACKAGES", 3)
    for agent_id in "abcde":
        runtime_kit.package(home, agent_id)
    agents = await _loaded(home)
    assert [card.id for card in agents.cards()] == ["a", "b", "c"]
    assert [(one.directory, str(one.error)) for one in agents.listing() if one.error is not None] == [
        (".", "it holds more than 3 packages: those from `d` on are not looked at (.)"),
    ]
    monkeypatch.setattr(packages, "MOST_ENTRIES", 2)
    await agents.reload()
    assert len(agents.cards()) == 2
    assert any("more than 2 entries" in str(one.error) for one in agents.listing())


async def test_of_many_with_one_id_each_names_few(home: Path) -> None:
    for number in range(30):
        runtime_kit.package(home, "twin", directory=f"{number:02}")
    listing = (await _loaded(home)).listing()
    assert len(listing) == 30
    assert all(len(str(one.error)) < 200 and "and 25 more" in str(one.error) for one in listing)


async def test_what_agents_require_is_what_bootstrap_grants(home: Path) -> None:
    runtime_kit.package(home, "a", required='["memory.read", "tool.web_search"]', optional='["agent.x"]')
    runtime_kit.package(home, "b", required='["memory.read"]')
    assert (await _loaded(home)).required() == {"memory.read", "tool.web_search"}


async def test_reload_says_what_changed_and_keeps_what_did_not(home: Path) -> None:
    for agent_id in ("a", "b", "c"):
        runtime_kit.package(home, agent_id)
    agents = await _loaded(home)
    before = agents.cards()
    assert await agents.reload() == Change()
    assert agents.cards() is before
    runtime_kit.package(home, "b", name="Another")
    (home / "agents" / "c" / "agent.toml").unlink()
    runtime_kit.package(home, "d")
    (runtime_kit.package(home, "e") / "agent.toml").write_text("")
    change = await agents.reload()
    assert (change.added, change.changed, change.removed) == (("d",), ("b",), ("c",))
    assert change.refused == (("e", "manifest_invalid"),)


async def test_change_that_cannot_be_written_down_takes_no_effect(home: Path) -> None:
    agents = await _loaded(home)
    runtime_kit.package(home, "a")

    async def refuses(change: Change) -> None:
        raise errors.StoreError("the disk is full")

    with pytest.raises(errors.StoreError):
        await agents.reload(refuses)
    assert agents.cards() == ()
    assert (await agents.reload()).added == ("a",)


async def test_package_that_was_changed_since_is_not_opened_for_run(home: Path) -> None:
    runtime_kit.package(home, "a", required='["tool.web_search"]')
    agents = await _loaded(home)
    card = agents.find("a")
    with packages.opened(card) as fd:
        assert "main.py" in os.listdir(fd)
    runtime_kit.package(home, "a")
    with pytest.raises(errors.StaleAgentError), packages.opened(card):
        pass
    await agents.reload()
    with packages.opened(agents.find("a")):
        pass


async def test_what_comes_changes_and_goes_is_seen_without_asking(home: Path) -> None:
    agents = await _loaded(home)
    seen: list[Change] = []
    changed = anyio.Event()

    async def noted(change: Change) -> None:
        nonlocal changed
        seen.append(change)
        changed.set()

    async def after(step: str) -> None:
        nonlocal changed
        with anyio.fail_after(60):
            await changed.wait()
        changed = anyio.Event()

    async with anyio.create_task_group() as group:
        group.start_soon(agents.watch, noted)
        # The watch's own first look finds what came before it watched.
        runtime_kit.package(home, "a")
        await after("it came")
        assert agents.find("a").manifest.agent.name == "Test"
        runtime_kit.package(home, "a", name="Renamed")
        await after("it changed")
        assert agents.find("a").manifest.agent.name == "Renamed"
        (home / "agents" / "a" / "agent.toml").unlink()
        await after("it went")
        assert agents.cards() == ()
        group.cancel_scope.cancel()
    assert [(one.added, one.changed, one.removed) for one in seen] == [
        (("a",), (), ()),
        ((), ("a",), ()),
        ((), (), ("a",)),
    ]


async def test_directory_made_before_its_watch_is_watched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = packages.directories

    def overtaken(place: Path) -> list[Path]:
        found = real(place)
        if not found:
            runtime_kit.package(home, "late")
        return found

    monkeypatch.setattr(packages, "directories", overtaken)
    agents = await _loaded(home)
    async with anyio.create_task_group() as group:
        group.start_soon(agents.watch)
        await _until(lambda: [card.id for card in agents.cards()] == ["late"])
        # By now the first scan of the first watch is over. A change in the directory has to reach the second one.
        await anyio.sleep(2)
        runtime_kit.package(home, "late", name="Changed")
        await _until(lambda: agents.cards()[0].manifest.agent.name == "Changed")
        group.cancel_scope.cancel()


async def _until(found: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not found():  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def test_place_that_cannot_be_watched_is_said(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "agents").write_text("a file")
    with anyio.fail_after(60):
        await Agents(home).watch()
    assert "not watched" in caplog.text


async def test_hanging_package_is_one_line_of_the_log(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "one\nERROR two"
    (home / "agents" / name).mkdir(parents=True)
    monkeypatch.setattr(other_mounts, "names", lambda place: frozenset({name}))
    monkeypatch.setattr(packages, "ANSWER_SECONDS", 0.0)
    (listed,) = (await _loaded(home)).listing()
    assert isinstance(listed.error, errors.HangingError)
    assert "package `one\\nERROR two`: the file system of the package does not answer" in caplog.text


async def test_error_of_package_on_other_file_system_has_no_path_of_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime_kit.package(home, "good")
    (home / "agents" / "far").touch()
    monkeypatch.setattr(other_mounts, "names", lambda place: frozenset({"far"}))
    good, far = (await _loaded(home)).listing()
    assert (good.id, good.error) == ("good", None)
    assert (far.directory, str(far.error)) == ("far", "the package cannot be read: Not a directory (far)")
