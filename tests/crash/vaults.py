"""Kill the vault's writer: acknowledged commands are there and readable, none is half done, all goes on.

(1) The commands, from an empty state, killed at a step.
(2) The vault is as it was after the last acknowledged command, or after the next one.
(3) The rest of the commands work as ever, without a repair. Then there is nothing that a calm life would not leave. No
    secret is in the clear anywhere. The log holds and agrees with the vault.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from policy import errors
from sandbox.vault import keys
from sandbox.vault.embedded import FOLDER, HEAD, FileVault
from tests.crash import traces
from tests.crash.campaign import Tally, verified
from tests.crash.server import Outcome, Server, Subject
from tests.crash.vault_work import COMMANDS, KEY, Held
from tests.kernel.world import World


class VaultCampaign:
    """The points of one vault. ``calibrate`` first: it lets it live unharmed and learns how many steps it takes."""

    def __init__(self, world: World, server: Server, tally: Tally) -> None:
        self._world, self._server, self._tally = world, server, tally
        self._key = world.base / KEY
        with (world.state / "config.toml").open("a") as stream:
            stream.write(f'[vault]\nkey = "{self._key}"\n')

    def calibrate(self) -> None:
        """Learn the number of steps of a life.

        Raises:
            AssertionError: a life that is not killed fails.
        """
        self._life(0, None)  # makes what every later life finds: the log, its key
        self._nothing()
        calm = self._life(0, None)
        assert calm.status == 0, calm.detail
        self.steps = calm.counts[0]
        self._before = traces.tree(self._world.home)
        assert self._ended() == []

    def attempt(self, step: int) -> list[str]:
        """Kill before this step, and return the faults, each with the step before it."""
        self._nothing()
        outcome = self._life(0, step)
        self._tally.count("the vault's writer" if outcome.fired else "nothing: it was over before")
        done = len(outcome.done)
        wrong = [] if outcome.status in (0, -9) else [f"it ended with {outcome.status} {outcome.detail}"]
        found = self._held()
        held: Sequence[Held] = [None, *(one.held for one in COMMANDS)]
        if found not in held[done : done + 2]:
            wrong.append(f"{done} commands were acknowledged, and the vault holds {found}")
        # A repeated command is done twice, so the next one to do is known by the content of the vault.
        first = done if found == held[done] else done + 1
        rest = self._life(first, None)
        if rest.status != 0:
            wrong.append(f"the rest from `{' '.join(COMMANDS[first].words)}` on: {rest.detail}")
        wrong += self._ended()
        wrong = [f"vault: step {step}: {one}" for one in wrong]
        self._tally.wrong += wrong
        return wrong

    def verified(self) -> list[str]:
        """Return the complaints about the whole log."""
        return [f"vault: {one}" for one in verified(self._world.state)]

    # --- the parts --------------------------------------------------------------------------------------

    def _life(self, first: int, step: int | None) -> Outcome:
        return self._server.subject(
            Subject(
                work="vault",
                state=str(self._world.state),
                home=str(self._world.home),
                issuer=dict(self._world.issuer),
                first=first,
                target=None if step is None else (0, step, "self"),
            )
        )

    def _nothing(self) -> None:
        """No vault, no key, as before the first command."""
        for path in (self._world.state / HEAD, self._key):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._world.state / FOLDER, ignore_errors=True)

    def _held(self) -> Held | str:
        """Return the content of the vault as a run would get it.

        None without a vault, a text when it cannot be read.
        """
        if not (self._world.state / FOLDER / "vault.json").exists():
            return None
        vault = FileVault(self._world.state, lambda: keys.configured(str(self._key)))
        try:
            return dict(self._secrets(vault))
        except errors.VaultError as e:
            return str(e)

    def _secrets(self, vault: FileVault) -> Iterator[tuple[tuple[str, str], tuple[int, str]]]:
        for entry in vault.entries():
            with vault.opened(entry.agent_id, entry.name) as found:
                assert found is not None
                yield (entry.agent_id, entry.name), (found.version, bytes(found.value.view).decode())

    def _ended(self) -> list[str]:
        """Return the differences from the state after a calm life."""
        wrong = [] if self._held() == COMMANDS[-1].held else [f"in the end it holds {self._held()}"]
        beside = {path.name for path in self._world.base.iterdir()} - {"home", "packages", self._key.name}
        wrong += [f"file {name}" for name in (*beside, *traces.unknown(self._world.home, self._before))]
        secrets = [one.secret.encode() for one in COMMANDS if one.secret]
        wrong += [f"a secret in the clear: {path}" for path in traces.holding(self._world.base, secrets)]
        return wrong + self._disagreements()

    def _disagreements(self) -> list[str]:
        """Return the rows on secrets that disagree with the vault: the last row of each secret counts."""
        said: dict[tuple[str, str], int] = {}
        for row in (row["kind"] for row in self._world.rows()):
            if row["type"] == "vault_changed" and row["action"] == "created":
                said = {}
            elif row["type"] == "vault_changed" and row["name"]:
                said[row["agent_id"], row["name"]] = 0 if row["action"] == "removed" else row["version"]
        there = {place: version for place, (version, _) in (COMMANDS[-1].held or {}).items()}
        logged = {place: version for place, version in said.items() if version}
        return [] if logged == there else [f"the log has {logged}, the vault {there}"]


@contextlib.contextmanager
def made(base: Path, server: Server, tally: Tally) -> Iterator[VaultCampaign]:
    """A vault in a world of its own."""
    base.mkdir()
    campaign = VaultCampaign(World(base), server, tally)
    campaign.calibrate()
    yield campaign
