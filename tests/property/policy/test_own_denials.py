"""The file of denials that an agent reads: whole lines of JSON within its bound, without the operator's causes."""

from __future__ import annotations

import json
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy.denials import LAYERS, Bounds, Denial
from policy.explain import own_denials
from policy.why import sight
from policy.why.ask import Sight
from policy.why.denied import MEANINGS
from tests.unit.policy.compile import sample

WORDS = st.text(max_size=60) | st.sampled_from(["/srv/x", "execve", "db", "10.0.0.1:80/tcp", "a.example.org", ""])
KNOWN = st.sampled_from(sorted(MEANINGS)).flatmap(lambda one: WORDS.map(lambda word: Denial(one[0], word, one[1])))
ANY = st.builds(Denial, st.sampled_from([*LAYERS, "strange"]), WORDS, st.text(max_size=12))


@cache
def seen() -> Sight:
    manifest = sample.manifest()
    return sight.of(sample.compiled(manifest), manifest, files=(), host=sample.host(), never={})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(KNOWN | ANY, st.integers(1, 9)), max_size=60), st.integers(600, 20_000))
def test_lines_are_whole_and_within_bound(refused: list[tuple[Denial, int]], most: int) -> None:
    told, bounds = own_denials.OwnDenials(seen, _left=most), Bounds()
    rows = [row for at, (denial, count) in enumerate(refused) for row in bounds.told(denial, now_ms=at, count=count)]
    lines = [told.line(row, at_ms=1) for row in rows]
    assert sum(map(len, lines)) <= most + len(own_denials.END)
    for row, raw in zip(rows, lines, strict=True):
        if not raw or raw == own_denials.END:
            continue
        assert raw.count(b"\n") == 1
        found = json.loads(raw)
        assert (found["layer"], found["target"], found["count"]) == (row.denial.layer, row.denial.target, row.count)
        if found["code"] == own_denials.REFUSED:
            assert row.denial.id not in raw.decode()
