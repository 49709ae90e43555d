"""Configurations of other tools as manifests, word for word; git shows the effect of a change.

Regenerate with `make golden`. To add a case, add a file with its ``inputs``.
"""

from __future__ import annotations

from typing import Any

import pytest

from policy.importing import formats
from tests.golden import importing_kit as kit

CASES = {name: kit.read(name) for name in kit.names()}
MADE = {name: case["outputs"] for name, case in CASES.items() if "manifest" in case.get("outputs", ())}


@pytest.mark.parametrize("name", CASES)
def test_source_is_imported_as_recorded(name: str) -> None:
    assert kit.written(CASES[name]["inputs"]) == (kit.HERE / f"{name}.json").read_text(), "see `make golden`"


@pytest.mark.parametrize("name", MADE)
def test_manifest_is_decided_without_refusal(name: str) -> None:
    manifest, decision = kit.decided("\n".join(MADE[name]["manifest"]) + "\n")
    assert manifest.wrote("resources.network")
    assert [str(one) for one in decision.refusals] == []


def of(source: str) -> list[dict[str, Any]]:
    return [case for case in CASES.values() if case["inputs"]["from"] == source]


def test_each_case_says_its_own_thing() -> None:
    assert len({case["inputs"]["about"] for case in CASES.values()}) == len(CASES)
    assert len([case for case in CASES.values() if "manifest" in case["outputs"]]) >= 40


@pytest.mark.parametrize("source", formats.NAMES)
def test_format_is_imported_and_refused(source: str) -> None:
    assert [case for case in of(source) if "manifest" in case["outputs"]]
    assert [case for case in of(source) if "refused" in case["outputs"]]


def test_each_kind_of_loss_is_there() -> None:
    kinds = {loss["kind"] for made in MADE.values() for loss in made["losses"]}
    assert kinds == {"narrower", "not_expressible", "refused"}


if __name__ == "__main__":
    for case_name in kit.names():
        (kit.HERE / f"{case_name}.json").write_text(kit.written(kit.read(case_name)["inputs"]))
