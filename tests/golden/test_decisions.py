"""The decision in more than a hundred cases, word for word and digest for digest; git shows the effect of a change.

Regenerate with `make golden`. To add a case, add a file with its ``inputs``.
"""

from __future__ import annotations

from typing import Any

import pytest

from policy import errors
from policy.compile.artefacts import NAMES
from policy.grants.effective import DOMAINS
from policy.grants.network import MODES
from tests.golden import decisions_kit as kit

CASES = {name: kit.read(name) for name in kit.names()}
# What the deciding half can refuse; what else an author or operator can do wrong, other rooms find out.
CODES = {
    "package_invalid", "manifest_invalid", "manifest_syntax", "unknown_syscall", "rule_1_schema", "never_grantable",
    "rule_2_signature", "unsigned", "unknown_key", "revoked", "envelope_expired", "wrong_audience", "digest_mismatch",
    "serial_rollback", "trust_root", "rule_3_role", "rule_4_parent", "rule_5_spawn_budget", "rule_6_resources",
    "rule_7_deny_list", "rule_8_identity", "rule_9_lifetime", "not_enforceable",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case_is_decided_as_recorded(name: str) -> None:
    assert kit.written(CASES[name]["inputs"]) == (kit.HERE / f"{name}.json").read_text(), "see `make golden`"


def outputs(verdict: str) -> list[dict[str, Any]]:
    return [case["outputs"] for case in CASES.values() if case["outputs"]["verdict"] == verdict]


def test_there_are_enough_and_each_says_what_it_shows() -> None:
    assert len(CASES) >= 60
    assert len({case["inputs"]["about"] for case in CASES.values()}) == len(CASES)


@pytest.mark.parametrize("rule", range(1, 10))
def test_each_rule_refuses_and_is_met(rule: int) -> None:
    mine = [case["outputs"] for name, case in CASES.items() if name.startswith(f"rule{rule}-")]
    assert [o for o in mine if o["verdict"] == "refused" and o["rule"] == rule]
    # Rules 1 and 7 are met by every case that is allowed; the others by one that comes as near as it may.
    assert rule in (1, 7) or [o for o in mine if o["verdict"] == "allowed"]


def test_each_refusal_of_deciding_half_is_there() -> None:
    seen = {o["code"] for o in outputs("refused")}
    assert seen == CODES
    assert set(errors.TABLE) >= CODES


def test_each_domain_each_mode_and_each_host_is_there() -> None:
    empty = {name: kind.bottom().canonical() for name, kind in DOMAINS.items()}
    for domain in DOMAINS:
        assert [o for o in outputs("allowed") if o["effective"].get(domain, empty[domain]) != empty[domain]], domain
    assert {o["effective"]["network"]["mode"] for o in outputs("allowed")} == set(MODES)
    assert {case["inputs"]["host"] for case in CASES.values()} == set(kit.HOSTS)


def test_parent_refuses_and_narrows_and_says_what_it_took() -> None:
    reject, narrow = CASES["rule4-reject"], CASES["rule4-narrow"]
    assert reject["inputs"] == {
        **{key: value for key, value in narrow["inputs"].items() if key != "on_excess"},
        "about": reject["inputs"]["about"],
    }
    assert reject["outputs"]["domains"] == narrow["outputs"]["delegation"]
    assert {name for name, row in narrow["outputs"]["delegation"].items() if row["removed"]} >= {
        "network",
        "filesystem",
    }


def test_what_is_allowed_comes_with_every_artefact_and_other_cases_have_other_digests() -> None:
    compiled = [o for o in outputs("allowed") if "digest" in o]
    assert len(compiled) > 40
    assert all(tuple(o["artefacts"]) == NAMES for o in compiled)
    assert len({o["digest"] for o in compiled}) > 30
