"""The intents of the year: sent by some clients at once, each under its own key, and compared with what is kept."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from covenant.wire import client
from policy import errors
from tests.year.clock import now_ms
from tests.year.machine import HERMES_AGENTS, Machine

CLIENTS: Final = 6
ECHO: Final = "phase 0 echo (no agent matched): "


@dataclass
class Asked:
    """One intent, and its answer once there is one."""

    key: str
    agent: str | None
    text: str
    at_ms: int = 0
    answer: dict[str, Any] | None = None
    repeated: bool = False

    def expected(self) -> str:
        """The text that answers it."""
        if self.agent is None:
            return ECHO + self.text
        return f"You said: {self.text}" if self.agent in HERMES_AGENTS else f"ran: {self.text}"


class Intents:
    """All intents, and what was wrong with their answers."""

    def __init__(self, machine: Machine, chance: random.Random, wrong: list[str]) -> None:
        self._machine, self._chance, self.wrong = machine, chance, wrong
        self.answered = 0
        self._kept: dict[str, Asked] = {}
        self._open: list[Asked] = []
        self._number = 0

    def batch(self, count: int, *, agent: str | None = "", kill: Callable[[], None] | None = None) -> None:
        """Send so many; ``kill`` is called after half of them are answered."""
        made = [self._make(agent) for _ in range(count)]
        self._send(made, kill=kill, after=count // 2)

    def again(self) -> None:
        """Send what was not answered again, under the same keys."""
        waiting, self._open = self._open, []
        for each in waiting:
            each.repeated = True
        self._send(waiting)

    def _make(self, agent: str | None) -> Asked:
        self._number += 1
        if agent == "":
            agent = self._chance.choice((*HERMES_AGENTS, None))
        word = "zzz" if agent is None else "say"
        return Asked(f"year-{self._number}", agent, f"{word} {self._number}")

    def _send(self, asked: list[Asked], *, kill: Callable[[], None] | None = None, after: int = 0) -> None:
        done: list[Asked] = []

        def work(share: list[Asked]) -> None:
            asking = client.connected(self._machine.daemon_home, answer_seconds=120)
            with contextlib.suppress(errors.DaemonSilentError, OSError), asking as one:
                for each in share:
                    each.answer = self._ask(one, each)
                    each.at_ms = now_ms()
                    done.append(each)
                    if kill is not None and len(done) == after:
                        kill()

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(work, [asked[number::CLIENTS] for number in range(CLIENTS)]))
        for each in asked:
            if each.answer is None:
                self._open.append(each)
            else:
                self._settle(each, each.answer)
        if kill is None and self._open:
            self.wrong.append(f"{len(self._open)} intents were not answered: {self._machine.log()[-500:]}")
            self._open.clear()

    def _ask(self, one: client.Client, each: Asked) -> dict[str, Any]:
        try:
            return one.ask("submit_intent", text=each.text, agent=each.agent, idempotency_key=each.key)
        except errors.DaemonSilentError:
            raise
        except errors.CovenantError as e:
            return {"status": e.code, "text": str(e)}

    def _settle(self, each: Asked, answer: dict[str, Any]) -> None:
        if "intent_id" not in answer or answer["text"] != each.expected():
            self.wrong.append(f"`{each.text}` of {each.agent} was answered with {str(answer)[:300]}")
            return
        self.answered += 1
        self._kept[answer["intent_id"]] = each

    def check(self, most: int) -> None:
        """Compare some of the kept answers with the daemon's."""
        chosen = self._chance.sample(sorted(self._kept), min(most, len(self._kept)))
        with client.connected(self._machine.daemon_home, answer_seconds=120) as one:
            for intent_id in chosen:
                try:
                    text = one.ask("get_intent_result", intent_id=intent_id)["text"]
                except errors.CovenantError as e:
                    self.wrong.append(f"answer {intent_id} was acknowledged and is not there: {e.code}")
                    continue
                if text != self._kept[intent_id].expected():
                    self.wrong.append(f"answer {intent_id} is {text!r}")

    def forget(self, before_ms: int) -> None:
        """Leave out what a purge took away, and what it may have."""
        self._kept = {name: one for name, one in self._kept.items() if one.at_ms > before_ms + 60_000}

    def kept(self) -> dict[str, Asked]:
        """Return the answers that must still be there, by intent."""
        return self._kept
