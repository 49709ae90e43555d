"""The index of all grants: every decision of the store, in memory and without waiting."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from covenant.stores.capabilities.interface import Grant, Use
from policy import errors
from policy.capabilities import actions, chain, scopes

# The limit for one subject and action, because a lookup reads all its grants. The daemon's own grants and those of
# other holders are counted separately, so that no holder can use up the places for the operator's grants.
MAX_PER_ACTION = 64
# The limit below one grant, counting revoked ones until a purge: no holder can fill the disk with grants.
MAX_BELOW = 1024


class GrantBook:
    """Grants indexed by signature, by subject and action, by concerned key, and by the grant that they narrow."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._grants: dict[str, Grant] = {}
        self._live: defaultdict[tuple[str, str], list[Grant]] = defaultdict(list)
        # Used as ordered sets: the newest come last.
        self._concerns: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._held: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._below: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._tombstones: dict[str, int] = {}

    def get(self, signature: str) -> Grant | None:
        """Return a grant, effective or not."""
        return self._grants.get(signature)

    def __iter__(self) -> Iterator[Grant]:
        return iter(self._grants.values())

    # --- looking up -------------------------------------------------------------------------------------

    def candidates(self, pubkey: str, action: str, now_ms: int) -> Sequence[Grant]:
        """See ``interface.Capabilities``."""
        found = self._live.get((pubkey, action))
        if not found:
            return ()
        held = [grant for grant in found if self._holds(grant, now_ms)]
        if len(held) < len(found):
            self._forget_ended(found, now_ms)
        return held

    def effective(self, grant: Grant, now_ms: int) -> bool:
        """See ``interface.Capabilities``."""
        return self._holds(grant, now_ms) and not any(map(used_up, self.lineage(grant.signature)))

    def _holds(self, grant: Grant, now_ms: int) -> bool:
        step: Grant | None = grant
        for _ in range(chain.MAX_DEPTH):
            if step is None or step.revoked_at_ms is not None or step.token.expired(now_ms):
                return False
            if not (step.sound if step.sound is not None else self._is_sound(step)):
                return False
            if step.parent is None:
                return True
            step = self._grants.get(step.parent)
        return False

    def lineage(self, signature: str) -> list[Grant]:
        """See ``interface.Capabilities``."""
        found: list[Grant] = []
        following: str | None = signature
        while following is not None:
            step = self._grants.get(following)
            if step is None or len(found) == chain.MAX_DEPTH:
                return []
            found.append(step)
            following = step.parent
        return found

    def recent(self, limit: int, pubkey: str) -> list[Grant]:
        """See ``interface.Capabilities``."""
        newest = (self._grants[signature] for signature in reversed(self._concerns.get(pubkey, {})))
        return list(itertools.islice((grant for grant in newest if grant.revoked_at_ms is None), limit))

    def usage(self, limit: int, pubkey: str) -> list[Grant]:
        """See ``interface.Capabilities``."""
        newest = reversed(self._held.get(pubkey, {}))
        return [self._grants[signature] for signature in itertools.islice(newest, limit)]

    # --- granting ---------------------------------------------------------------------------------------

    def check(self, grant: Grant, now_ms: int) -> Grant | None:
        """Return the stored grant if it is effective; None if ``add`` may store this one, whose generation is then set.

        Raises:
            errors.CapabilityInvalidError: it, or the chain above it, does not verify.
            errors.GrantRefusedError: the subject has too many grants of the action, or the grant above has too many
                below it.
        """
        above = self.lineage(grant.parent) if grant.parent is not None else []
        if grant.parent is not None and not above:
            raise errors.CapabilityInvalidError("the grant above it is not here, or too far below the daemon's own")
        reason = chain.verify([grant.link, *(one.link for one in above)], root=self._root, now_ms=now_ms)
        if reason is None and above and not self.effective(above[0], now_ms):
            reason = "the grant above it holds no more"
        if reason is not None:
            raise errors.CapabilityInvalidError(f"no grant of `{grant.token.action[:80]}`: {reason}")
        present = self._grants.get(grant.signature)
        if present is not None and self.effective(present, now_ms):
            return present
        self._check_room(grant, now_ms)
        buried = self._tombstones.get(grant.signature, -1)
        grant.generation = 1 + max(buried, present.generation if present is not None else -1)
        grant.sound = True
        return None

    def add(self, grant: Grant) -> None:
        """Add a grant, in place of one with the same signature."""
        present = self._grants.get(grant.signature)
        if present is not None:
            if present.generation > grant.generation:
                return
            self._take_out(present)
        self._grants[grant.signature] = grant
        token = grant.token
        self._held[token.subject][grant.signature] = None
        grant.concerns = self._concerned(grant)
        for key in grant.concerns:
            self._concerns[key][grant.signature] = None
        if grant.parent is not None:
            self._below[grant.parent][grant.signature] = None
        if self._tombstones.get(grant.signature, -1) < grant.generation:
            self._enter(grant)
        else:
            grant.revoked_at_ms = 0

    def _enter(self, grant: Grant) -> None:
        row = self._live[grant.token.subject, grant.token.action]
        # The daemon's own grants come before those that holders gave.
        at = sum(one.parent is None for one in row) if row and grant.parent is None else len(row)
        row.insert(at, grant)

    def set_clock(self, now_ms: int) -> None:
        """Offer grants again that had ended only by a clock that was ahead."""
        for grant in self:
            row = self._live.get((grant.token.subject, grant.token.action), [])
            if grant.revoked_at_ms is None and grant not in row and not grant.token.expired(now_ms):
                self._enter(grant)

    def _concerned(self, grant: Grant) -> frozenset[str]:
        above = self._grants.get(grant.parent) if grant.parent is not None else None
        keys = {grant.token.subject, grant.token.granted_by}
        return frozenset(keys if above is None else keys | {above.token.subject})

    def _check_room(self, grant: Grant, now_ms: int) -> None:
        if grant.parent is not None and len(self._below.get(grant.parent, ())) >= MAX_BELOW:
            raise errors.GrantRefusedError(f"{MAX_BELOW} grants stand below the one that should be narrowed")
        row = self._live.get((grant.token.subject, grant.token.action), [])
        alike = [one for one in row if (one.parent is None) == (grant.parent is None)]
        if len(alike) >= MAX_PER_ACTION and sum(self.effective(one, now_ms) for one in alike) >= MAX_PER_ACTION:
            raise errors.GrantRefusedError(
                f"the subject has {MAX_PER_ACTION} grants of `{grant.token.action}`", hint="revoke those not needed"
            )

    def _is_sound(self, grant: Grant) -> bool:
        """Whether a grant passes the checks that never change. Cached on first use: a daemon with many grants starts at
        once."""
        token = grant.token
        sound = scopes.check(token.action, token.scope) is None and actions.well_formed(token.action)
        if grant.parent is None:
            # A scope with a malformed parent has no parent, and no holder could have issued it.
            sound = sound and token.granted_by == self._root and not _claims_parent(token.scope)
        else:
            above = self._grants.get(grant.parent)
            sound = sound and above is not None and chain.step(token, above.link, root=self._root) is None
        grant.sound = sound and token.verifies(grant.signature)
        return grant.sound

    # --- ending -----------------------------------------------------------------------------------------

    def descent(self, signature: str) -> list[Grant]:
        """Return the grant and all below it that are not revoked."""
        found: dict[str, Grant] = {}
        waiting = [signature]
        while waiting:
            step = waiting.pop()
            grant = self._grants.get(step)
            if grant is None or step in found:
                continue
            found[step] = grant
            waiting += self._below.get(step, ())
        return [grant for grant in found.values() if grant.revoked_at_ms is None]

    def bury(self, signature: str, generation: int, revoked_at_ms: int) -> None:
        """Revoke a grant, up to ``generation``."""
        self._tombstones[signature] = max(generation, self._tombstones.get(signature, -1))
        grant = self._grants.get(signature)
        if grant is not None and grant.generation <= generation:
            grant.revoked_at_ms = revoked_at_ms
            self._leave(grant)

    def to_purge(self, before_ms: int, now_ms: int) -> set[str]:
        """Return the signatures of grants that were revoked or ended before ``before_ms``, and of all below them."""
        dropped: set[str] = set()
        waiting = [grant.signature for grant in self if _over(grant, before_ms, now_ms)]
        while waiting:
            step = waiting.pop()
            if step not in dropped and step in self._grants:
                dropped.add(step)
                waiting += self._below.get(step, ())
        return dropped

    def drop(self, signatures: Iterable[str]) -> None:
        """Remove grants and their tombstones."""
        for signature in signatures:
            self._take_out(self._grants[signature])
            self._tombstones.pop(signature, None)

    def _take_out(self, grant: Grant) -> None:
        self._leave(grant)
        self._grants.pop(grant.signature, None)
        for index, keys in ((self._concerns, grant.concerns), (self._held, (grant.token.subject,))):
            for key in keys:
                index[key].pop(grant.signature, None)
                if not index[key]:
                    del index[key]
        if grant.parent is not None:
            self._below[grant.parent].pop(grant.signature, None)
            if not self._below[grant.parent]:
                del self._below[grant.parent]

    def _leave(self, grant: Grant) -> None:
        key = (grant.token.subject, grant.token.action)
        row = self._live.get(key)
        if row is not None and grant in row:
            row.remove(grant)
            if not row:
                del self._live[key]

    def _forget_ended(self, row: list[Grant], now_ms: int) -> None:
        for grant in [one for one in row if one.token.expired(now_ms) or one.sound is False]:
            self._leave(grant)

    # --- counting ---------------------------------------------------------------------------------------

    def count(self, signatures: Sequence[str]) -> list[Grant]:
        """Count one use of each grant and of each above it. Returns the metered ones.

        Raises:
            errors.CapabilityExhaustedError: one is used up; nothing was counted.
        """
        metered = self.left(signatures)
        for grant in metered:
            grant.used += 1
        return metered

    def uses(self, signatures: Sequence[str]) -> list[Use]:
        """Return the uses of each grant so far: of itself if it is metered, else of the next metered one above it."""
        metered = ((one for one in self.lineage(each) if one.max_uses is not None) for each in signatures)
        return [use_of(grant) for grant in (next(lineage, None) for lineage in metered) if grant is not None]

    def left(self, signatures: Sequence[str]) -> list[Grant]:
        """Check as ``count`` without counting.

        Raises:
            errors.CapabilityExhaustedError: one of them is used up.
        """
        lineages = map(self.lineage, signatures)
        metered = [grant for lineage in lineages for grant in lineage if grant.max_uses is not None]
        wanted = Counter(grant.signature for grant in metered)
        for grant in metered:
            if grant.used + wanted[grant.signature] > (grant.max_uses or 0):
                raise errors.CapabilityExhaustedError(
                    f"the grant of `{grant.token.action}` was used {grant.used} times, as often as it may be",
                    hint="whoever gave it can give another",
                    use=use_of(grant),
                )
        return metered


def used_up(grant: Grant) -> bool:
    """Whether a grant has no uses left."""
    return grant.max_uses is not None and grant.used >= grant.max_uses


def use_of(grant: Grant) -> Use:
    """Return the number of uses of a metered grant so far."""
    return Use(grant.signature, grant.token.action, grant.max_uses or 0, grant.used)


def _over(grant: Grant, before_ms: int, now_ms: int) -> bool:
    if grant.revoked_at_ms is not None and grant.revoked_at_ms < before_ms:
        return True
    ends = grant.token.expires_at
    # A cut-off in the future removes no grant that is still effective.
    return ends is not None and ends < before_ms and grant.token.expired(now_ms)


def _claims_parent(scope: object) -> bool:
    return isinstance(scope, dict) and scopes.PARENT in scope
