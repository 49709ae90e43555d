"""Claims of envelopes: once each, also after a restart, and dropped when they are too old to come again."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.stores.mailbox import seen_envelopes
from covenant.stores.mailbox.seen_envelopes import Claim, SeenEnvelopes
from policy import errors

pytestmark = pytest.mark.anyio
HORIZON = seen_envelopes.MAX_AGE_MS + seen_envelopes.MAX_SKEW_MS


async def test_claim_is_fresh_once_and_across_restarts(tmp_path: Path) -> None:
    claims = [Claim("a", "t", 5), Claim("a", "t", 6), Claim("b", "t", 5), Claim("a", "u", 5)]
    for expected in (True, False):
        seen = await SeenEnvelopes.open(tmp_path)
        assert [await seen.claim(one, 10) for one in claims] == [expected] * 4
        assert not await seen.claim(claims[0], 5 + HORIZON)
        await seen.close()


async def test_old_claims_leave_memory_and_file(tmp_path: Path) -> None:
    seen = await SeenEnvelopes.open(tmp_path)
    for number in range(200):
        assert await seen.claim(Claim("a", str(number), number), number)
    assert await seen.claim(Claim("a", "new", HORIZON + 150), HORIZON + 150)
    await seen.close()
    lines = (tmp_path / seen_envelopes.FILE).read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ('["a","150",150]', f'["a","new",{HORIZON + 150}]', 51)


@pytest.mark.parametrize("line", ['["a","t"]', '["a","t",true]', "{}", "x"])
async def test_line_that_is_no_claim_is_refused(tmp_path: Path, line: str) -> None:
    await (await SeenEnvelopes.open(tmp_path)).close()
    (tmp_path / seen_envelopes.FILE).write_text(line + "\n")
    with pytest.raises(errors.StoreError):
        await SeenEnvelopes.open(tmp_path)
