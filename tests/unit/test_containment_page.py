"""docs/containment*.md are what the tables of probes say; `make contain` writes them when it saw every row to be so."""

from __future__ import annotations

from tests.kernel import hostile_combinations as combinations
from tests.kernel import hostile_page, hostile_settings
from tests.kernel import hostile_table as table


def test_page_is_in_step_with_probes() -> None:
    for name, text in hostile_page.pages().items():
        assert (hostile_page.DOCS / name).read_text(encoding="utf-8") == text, "run `make contain`"


def test_every_setting_is_run_and_every_word_of_table_is_granted_somewhere() -> None:
    assert {one.setting for one in combinations.COMBINATIONS} == set(hostile_settings.SETTINGS)
    words = {word for one in hostile_settings.SETTINGS.values() for word in one.grants}
    assert {probe.grants for probe in combinations.PROBES} - {""} == words


def test_every_probe_is_blocked_in_some_combination_or_is_itself_what_is_granted() -> None:
    for probe in combinations.PROBES:
        if probe.id.removeprefix("node_").startswith("granted_"):
            continue
        settings = [hostile_settings.SETTINGS[one.setting] for one in combinations.COMBINATIONS if probe in one.probes]
        assert any(probe.grants not in one.grants for one in settings), probe.id


def test_there_are_as_many_probes_as_page_must_have() -> None:
    sandbox, _ = table.load()
    assert len(combinations.PROBES) + len(sandbox) >= 150
