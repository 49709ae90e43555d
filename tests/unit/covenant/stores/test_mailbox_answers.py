"""Check which earlier answer is forgotten first, against a scan of all answers, after any adds and undos."""

from __future__ import annotations

import random

from covenant.stores.mailbox.answers import Answers, Cached
from covenant.stores.mailbox.queue import Key
from covenant.wire.types import A2ATaskResult

RESULT = A2ATaskResult(task_id="t", status="ok", content=())


def by_looking_at_all(kept: dict[Key, Cached], *, by_count: bool) -> Key:
    has: dict[str, int] = {}
    for key, cached in kept.items():
        has[key.sender] = has.get(key.sender, 0) + (1 if by_count else cached.size)
    most = max(has.values())
    sender = min(name for name, number in has.items() if number == most)
    return min((key for key in kept if key.sender == sender), key=lambda key: kept[key].turn)


def test_oldest_of_who_has_most_goes_first() -> None:
    chooser = random.Random(3)
    for size in (4, 300):
        answers, kept = Answers(), dict[Key, Cached]()
        keys = [Key(chooser.choice("abcde"), "r", "w", str(n)) for n in range(size)]
        undo: list[tuple[Key, Cached | None]] = []
        for turn in range(1500):
            key, step = chooser.choice(keys), chooser.random()
            new: Cached | None = Cached(RESULT, 0, chooser.randrange(5), turn) if step < 0.6 else None
            if undo and step > 0.9:
                # An answer that could not be written is undone, and the older answer under its key is restored.
                key, new = undo.pop()
            else:
                undo.append((key, kept.get(key)))
            if step > 0.7 and step < 0.75:
                undo.clear()
            answers.put(key, new)
            kept.pop(key, None)
            if new is not None:
                kept[key] = new
            assert (len(answers), answers.size) == (len(kept), sum(one.size for one in kept.values()))
            assert answers.get(key) == new
            for by_count in (True, False) if kept else ():
                assert answers.first_to_go(by_count=by_count) == by_looking_at_all(kept, by_count=by_count)
        assert list(answers.items()) == sorted(kept.items(), key=lambda one: one[1].turn)


def test_what_is_out_of_date_does_not_pile_up() -> None:
    answers = Answers()
    for turn in range(5000):
        answers.put(Key("a", "r", "w", str(turn % 10)), Cached(RESULT, 0, turn % 3, turn))
    held = answers._of["a"]
    assert max(len(answers._by_count), len(answers._by_size), len(held.ages)) < 200
    for turn in range(10):
        answers.put(Key("a", "r", "w", str(turn)), None)
    assert (len(answers), answers.size, answers._of) == (0, 0, {})
