"""Attack: meet a threshold with fewer people than it says."""

from __future__ import annotations

import pytest

from policy import errors
from policy.signing import root as roots
from policy.signing import trust
from tests import signing_kit as kit

NOW = kit.NOW
op = kit.operator


def _refused(root: roots.TrustRoot, *signers: int) -> None:
    with pytest.raises(errors.SignatureError, match="are needed"):
        kit.verify(kit.signed(*signers), root)


def test_each_subset_below_threshold_is_refused() -> None:
    root = kit.root(*(op(n, threshold=3) for n in (1, 2, 3, 4)))
    for few in ((1,), (4,), (1, 2), (3, 4), (1, 1, 1), (1, 2, 9)):
        _refused(root, *few)
    for many in ((1, 2, 3), (2, 3, 4), (1, 2, 3, 4)):
        assert len(kit.verify(kit.signed(*many), root).signers) == len(many)


def test_low_threshold_is_not_met_with_help_of_key_that_itself_is_not() -> None:
    root = kit.root(op(1, threshold=3), op(2, threshold=2), op(3, threshold=3))
    _refused(root, 1, 2)
    _refused(root, 2, 3)
    kit.verify(kit.signed(1, 2, 3), root)


def test_fewest_that_can_be_enough_is_said() -> None:
    root = kit.root(op(1, threshold=2), op(2, threshold=4), op(3), op(4), op(5))
    with pytest.raises(errors.SignatureError, match="1 operators signed and 2 are needed"):
        kit.verify(kit.signed(1), root)
    with pytest.raises(errors.SignatureError, match="1 operators signed and 4 are needed"):
        kit.verify(kit.signed(2), root)
    with pytest.raises(errors.SignatureError, match="2 operators signed and 3 are needed"):
        kit.verify(kit.signed(1, 2), root)


@pytest.mark.parametrize(
    "other",
    [
        {"scope": kit.scope(agents=("elsewhere",))},
        {"scope": kit.scope(agents=("hell",))},
        {"expires_at": NOW},
        {"not_before": NOW + 1},
    ],
)
def test_key_that_may_not_sign_this_makes_up_no_number(other: dict[str, object]) -> None:
    _refused(kit.root(op(1, threshold=2), op(2, **other), op(3)), 1, 2)
    kit.verify(kit.signed(1, 2), kit.root(op(1, threshold=2), op(2), op(3)))


def test_key_for_other_roles_makes_up_no_number_once_role_is_known() -> None:
    reader = op(2, threshold=2, scope=kit.scope(roles=("reader",)))
    trusted = kit.verify(kit.signed(1, 2), kit.root(op(1, threshold=2), reader, op(3)))
    assert len(trust.authorise(trusted, agent_id="hello", role="reader", operator=None)) == 2
    for role in ("writer", None):
        with pytest.raises(errors.SignatureError, match="are needed"):
            trust.authorise(trusted, agent_id="hello", role=role, operator=None)


def test_key_whose_demand_is_not_met_is_not_operator() -> None:
    trusted = kit.verify(kit.signed(1, 2), kit.root(op(1), op(2, threshold=3)))
    assert trust.authorise(trusted, agent_id="hello", role=None, operator="op1")
    with pytest.raises(errors.SignatureError, match="who did not sign"):
        trust.authorise(trusted, agent_id="hello", role=None, operator="op2")


def test_root_is_signed_by_distinct_people_old_and_new() -> None:
    present = kit.root(op(1), op(2), op(3), threshold=2)
    document = kit.root_document(op(1), op(2), op(4), threshold=2, version=2)
    raw = {signers: kit.root_bytes(document, *signers) for signers in ((1,), (1, 1), (1, 3), (1, 4), (3, 4), (1, 2))}
    for few in ((1,), (1, 1), (1, 4), (3, 4)):
        with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
            present.successor(raw[few], NOW)
    # Two of the old, but of the new only one.
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 2"):
        present.successor(raw[1, 3], NOW)
    assert present.successor(raw[1, 2], NOW).version == 2


def test_version_that_lowers_threshold_takes_old_one() -> None:
    present = kit.root(op(1), op(2), threshold=2)
    document = kit.root_document(op(1), op(2), threshold=1, version=2)
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        present.successor(kit.root_bytes(document, 1), NOW)
    lowered = present.successor(kit.root_bytes(document, 1, 2), NOW)
    # And one that raises it takes the new one.
    raised = kit.root_document(op(1), op(2), threshold=2, version=3)
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 3"):
        lowered.successor(kit.root_bytes(raised, 1), NOW)
    assert lowered.successor(kit.root_bytes(raised, 1, 2), NOW).version == 3
