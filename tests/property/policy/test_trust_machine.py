"""Apply any sequence of honest and dishonest changes to a trust root, and check its invariants after each one.

The machine does not use the code that makes or counts versions. It keeps its own record of listed keys and their
thresholds, of revocations, and of the signatures on a version.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policy import errors
from policy.signing import change, proposal
from policy.signing import root as roots
from tests import signing_kit as kit

NOW = kit.NOW
numbers = st.integers(1, 6)
everybody = (1, 2, 3, 4, 5, 6)
# Half of the draws have enough signers, so that the machine makes progress.
signers = st.just(everybody) | st.sets(numbers, max_size=6).map(lambda some: tuple(sorted(some)))
agents = st.sampled_from([("*",), ("a*",), ("hello",)])


def _fair(thresholds: dict[int, int], signed: tuple[int, ...]) -> int:
    """Return the size of the largest fair group of signers, by trying every size."""
    listed = [thresholds[n] for n in signed if n in thresholds]
    return max((size for size in range(len(listed) + 1) if sum(t <= size for t in listed) >= size), default=0)


class TrustMachine(RuleBasedStateMachine):
    """A trust root that operators and strangers try to update."""

    @initialize(threshold=st.integers(1, 2))
    def begin(self, threshold: int) -> None:
        self.root = kit.root(kit.operator(1), kit.operator(2), threshold=threshold)
        self.ever_revoked: set[str] = set()
        self.highest: dict[str, int] = {}
        self.versions = 1

    def _move(self, made: proposal.Proposal, by: tuple[int, ...]) -> None:
        raw = kit.envelope(made.envelope.payload, *(by or (9,)), payload_type=roots.PAYLOAD_TYPE)
        may = True
        for document in (self.root.document, made.document):
            thresholds = {n: k.threshold for n in range(1, 7) for k in document.root_keys if k.key == kit.public(n)}
            may = may and _fair(thresholds, by) >= document.threshold
        complete = proposal.decode(raw).complete(self.root, NOW)
        assert complete is may
        try:
            self.root = self.root.successor(raw, NOW)
        except errors.TrustError:
            assert not may
            return
        assert may
        self.versions += 1
        self.ever_revoked |= {k.keyid for k in self.root.document.revoked.keys}

    def _try(self, build: Any, by: tuple[int, ...]) -> None:
        try:
            made = build()
        except errors.TrustError:
            return
        self._move(made, by)

    @rule(n=numbers, threshold=st.integers(1, 3), root=st.booleans(), scope=agents, by=signers)
    def add(self, n: int, threshold: int, root: bool, scope: tuple[str, ...], by: tuple[int, ...]) -> None:
        entry = kit.operator(n, threshold=threshold, root=root, scope=kit.scope(agents=scope))
        self._try(lambda: change.add(self.root.document, entry), by)

    @rule(n=numbers, threshold=st.integers(1, 3), wanted=st.none() | st.integers(1, 3), by=signers)
    def update(self, n: int, threshold: int, wanted: int | None, by: tuple[int, ...]) -> None:
        fields = {"threshold": threshold}
        self._try(lambda: change.update(self.root.document, f"op{n}", fields, root_threshold=wanted), by)

    @rule(n=numbers, by=signers)
    def remove(self, n: int, by: tuple[int, ...]) -> None:
        self._try(lambda: change.remove(self.root.document, f"op{n}"), by)

    @rule(n=numbers, to=numbers, reason=st.none() | st.just("lost"), by=signers)
    def rotate(self, n: int, to: int, reason: str | None, by: tuple[int, ...]) -> None:
        public, end = kit.public(to).raw.hex(), self.root.document.expires_at
        self._try(
            lambda: change.rotate(
                self.root.document, f"op{n}", public, now_ms=0, expires_at=end, new_name=f"op{to}", reason=reason
            ),
            by,
        )

    @rule(n=numbers, wanted=st.none() | st.just(1), by=signers)
    def revoke(self, n: int, wanted: int | None, by: tuple[int, ...]) -> None:
        keyid = kit.public(n).keyid
        self._try(
            lambda: change.revoke_key(self.root.document, keyid, now_ms=NOW, reason="lost", root_threshold=wanted), by
        )

    @rule(agent=st.sampled_from(["hello", "other"]), at_most=st.integers(0, 5), by=signers)
    def revoke_serials(self, agent: str, at_most: int, by: tuple[int, ...]) -> None:
        before = self.root.version
        self._try(lambda: change.revoke_serials(self.root.document, agent, at_most, now_ms=NOW, reason="old"), by)
        if self.root.version > before:
            assert at_most > self.highest.get(agent, -1)
            self.highest[agent] = at_most

    @rule(drop=st.sampled_from(["keys", "manifests", "serials"]))
    def forget(self, drop: str) -> None:
        """All key holders together sign a version without the revocations."""
        values = self.root.document.model_dump() | {"version": self.root.version + 1}
        if not values["revoked"][drop]:
            return
        values["revoked"] = {**values["revoked"], drop: ()}
        raw = kit.envelope(proposal.make(values).envelope.payload, *everybody, payload_type=roots.PAYLOAD_TYPE)
        with pytest.raises(errors.TrustError, match="takes back a revocation"):
            self.root.successor(raw, NOW)

    @rule()
    def again(self) -> None:
        """Install the same version once more."""
        with pytest.raises(errors.TrustError, match="cannot follow"):
            self.root.successor(self.root.raw, NOW)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "root"):
            return
        document = self.root.document
        assert document.version == self.versions
        assert roots.TrustRoot.parse(self.root.raw) == self.root
        revoked = {k.keyid for k in document.revoked.keys}
        assert revoked == self.ever_revoked
        assert not revoked & {k.key.keyid for k in document.keys}
        assert {s.agent_id: s.serial_at_most for s in document.revoked.serials} == self.highest
        # The remaining root keys can always sign a next version.
        assert (
            _fair(
                {n: k.threshold for n in range(1, 7) for k in document.root_keys if k.key == kit.public(n)},
                tuple(range(1, 7)),
            )
            >= document.threshold
        )
        # A package is accepted only from keys that are listed, cover its id and count.
        covering = {
            n: k.threshold
            for n in range(1, 7)
            for k in document.keys
            if k.key == kit.public(n) and k.scope.covers_agent("hello")
        }
        for by in ((1,), (2, 3), (1, 2, 3, 4, 5, 6)):
            try:
                counted = len(kit.verify(kit.signed(*by, serial=NOW), self.root).signers)
            except errors.SignatureError:
                counted = 0
            assert counted == _fair(covering, by)


TrustMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestTrustMachine = TrustMachine.TestCase
