"""Two packages of one agent id: which of them wins, and what ends."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec import structs

from policy import errors
from policy.rules import nine, succession
from policy.rules.case import Claimant, Owner
from policy.rules.succession import Beside, LiveSerial
from tests import rules_kit as kit

OLD, NEW = "aa" * 32, "bb" * 32
ANN, BOB = "11" * 32, "22" * 32
OWNER = Owner("agents/old", OLD, run_id="run-1", serial=5, signers=frozenset({ANN}))
CLAIMANT = Claimant(serial=6, signers=frozenset({ANN}), listed=frozenset({ANN, BOB}))


def beside(owner: Owner = OWNER, claimant: Claimant | None = CLAIMANT, name: str = "agents/new") -> Beside:
    return succession.beside(owner, claimant, payload_digest=NEW, package_name=name)


def owner(**changes: object) -> Owner:
    return structs.replace(OWNER, **changes)


def claimant(**changes: object) -> Claimant:
    return structs.replace(CLAIMANT, **changes)


CASES = {
    "newer": (OWNER, CLAIMANT, Beside.SUPERSEDES),
    "newer in the same place": (owner(package="agents/new"), CLAIMANT, Beside.SUPERSEDES),
    "the same payload": (owner(payload_digest=NEW), CLAIMANT, Beside.SAME),
    "the same payload above": (owner(payload_digest=NEW), claimant(above=frozenset({"run-1"})), Beside.SAME),
    "equal": (owner(serial=6), CLAIMANT, Beside.OLDER),
    "older": (owner(serial=7), CLAIMANT, Beside.OLDER),
    "older in the same place": (owner(serial=7, package="agents/new"), CLAIMANT, Beside.OLDER),
    "above": (OWNER, claimant(above=frozenset({"run-0", "run-1"})), Beside.ABOVE),
    "another run above": (OWNER, claimant(above=frozenset({"run-0"})), Beside.SUPERSEDES),
    "another operator": (OWNER, claimant(signers=frozenset({BOB})), Beside.OTHER),
    "both operators": (OWNER, claimant(signers=frozenset({ANN, BOB})), Beside.SUPERSEDES),
    "one of two operators": (owner(signers=frozenset({ANN, BOB})), CLAIMANT, Beside.SUPERSEDES),
    "after a rotation": (
        OWNER,
        claimant(signers=frozenset({BOB}), listed=frozenset({BOB})),
        Beside.SUPERSEDES,
    ),
    "one of two was taken out": (
        owner(signers=frozenset({ANN, "33" * 32})),
        claimant(signers=frozenset({BOB})),
        Beside.OTHER,
    ),
    "an owner without a serial": (owner(serial=None), CLAIMANT, Beside.OTHER),
    "an owner without a serial, same place": (owner(serial=None, package="agents/new"), CLAIMANT, Beside.SAME),
    "a claimant without a serial": (OWNER, None, Beside.OTHER),
    "a claimant without a serial, same place": (owner(package="agents/new"), None, Beside.SAME),
}


@pytest.mark.parametrize(("one", "asks", "wanted"), CASES.values(), ids=CASES)
def test_package_beside_another(one: Owner, asks: Claimant | None, wanted: Beside) -> None:
    assert beside(one, asks) is wanted


@pytest.mark.parametrize(
    ("held", "setting", "wanted"),
    [
        (LiveSerial(5, 6), "end", True),
        (LiveSerial(5, 6), "finish", False),
        (LiveSerial(6, 6), "end", False),
        (LiveSerial(7, 6), "end", False),
        (LiveSerial(5, None), "end", False),
        (LiveSerial(None, 6), "end", False),
        (LiveSerial(5, 6, waits=True), "end", False),
    ],
)
def test_which_runs_end(held: LiveSerial, setting: succession.OnNewer, wanted: bool) -> None:
    assert succession.ends(held, setting) is wanted


def test_rule_8_lets_newer_serial_start() -> None:
    made = kit.case(identities={"hello": (OWNER,)}, package_name="agents/hello", claimant=CLAIMANT)
    assert kit.refusals(made) == {}
    without = dataclasses.replace(made, claimant=None)
    assert set(kit.refusals(without)) == {8}
    second = owner(signers=frozenset({BOB}))
    both = dataclasses.replace(made, identities={"hello": (OWNER, second)})
    assert set(kit.refusals(both)) == {8}, "one owner that it does not supersede refuses it"


@pytest.mark.parametrize(("serial", "said"), [(7, "is older than 7"), (6, "was accepted for another package")])
def test_rule_8_refuses_lower_serial_as_ratchet(serial: int, said: str) -> None:
    """A newer one was accepted and runs already, after the older one was verified."""
    late = {"hello": (owner(serial=serial),)}
    made = kit.case(identities=late, package_name="agents/hello", claimant=CLAIMANT)
    with pytest.raises(errors.SerialError, match=said):
        nine.decide(made)
    nine.decide(dataclasses.replace(made, claimant=claimant(serial=8)))


def test_rule_8_names_run_above_and_fix() -> None:
    above = claimant(above=frozenset({"run-1"}))
    made = kit.case(identities={"hello": (OWNER,)}, package_name="agents/hello", claimant=above)
    with pytest.raises(errors.IdentityViolation, match="belongs to `agents/old`, which runs above this one") as caught:
        nine.decide(made)
    assert caught.value.hint == "start the newer version from outside of that run"
    # The fix: the same package, and that run is not above it.
    nine.decide(dataclasses.replace(made, claimant=CLAIMANT))
