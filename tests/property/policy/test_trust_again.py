"""Check the short second verification: it trusts a package only if the whole procedure would, after any change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policy import errors
from policy.signing import trust
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY
# Times around every validity bound of the package and its keys below.
times = st.sampled_from([NOW - 2 * DAY, NOW - 1, NOW, NOW + 5, NOW + 9, NOW + 10, NOW + 20, NOW + 30]) | st.integers(
    NOW - 5 * DAY, NOW + 5 * DAY
)
ratchets = st.sampled_from([None, (NOW, None), (NOW, "0" * 64), (NOW - 1, None), (NOW + 1, None)])


def _root() -> trust.TrustRoot:
    first, second = kit.operator(1, threshold=1), kit.operator(2, threshold=1, expires_at=NOW + 10, not_before=NOW - 1)
    third = kit.operator(3, threshold=2, expires_at=NOW + 20)
    return kit.root(first, second, third, expires_at=NOW + 30)


@given(
    by=st.sampled_from([(1,), (2,), (1, 2), (2, 3), (1, 3), (1, 2, 3)]),
    now_ms=times,
    greatest_time_ms=times,
    audience=st.sampled_from([kit.HOST, "another"]),
    ratchet=ratchets,
    fields=st.fixed_dictionaries({}, optional={"expires_at": st.just(NOW + 5), "audience": st.just(kit.HOST)}),
)
def test_what_is_trusted_again_would_be_verified(
    by: tuple[int, ...],
    now_ms: int,
    greatest_time_ms: int,
    audience: str,
    ratchet: tuple[int, str | None] | None,
    fields: dict[str, Any],
) -> None:
    root, package = _root(), kit.signed(*by, **fields)
    before = kit.verify(package, root)
    serials = kit.Serials()
    if ratchet is not None:
        serials["hello"] = trust.Accepted(ratchet[0], ratchet[1] or before.payload_digest)
    later: dict[str, Any] = {"now_ms": now_ms, "greatest_time_ms": greatest_time_ms}
    later |= {"audience": audience, "serials": serials}
    whole = _outcome(lambda: kit.verify(package, root, **later))
    found = _outcome(lambda: trust.again(before, root, **later))
    if isinstance(whole, trust.TrustedPackage) and whole.signers != before.signers:
        # A key that counted has expired. The short check does not ask again what that key alone allowed: it refuses.
        lost = next(one.name for one in before.signers if one not in whole.signers)
        assert found == (errors.ExpiredError.code, f"the key of `{lost}`, which counted, is not valid now")
    else:
        assert found == whole


def _outcome(decide: Callable[[], trust.TrustedPackage]) -> trust.TrustedPackage | tuple[str, str]:
    try:
        return decide()
    except errors.CovenantError as e:
        return e.code, e.message
