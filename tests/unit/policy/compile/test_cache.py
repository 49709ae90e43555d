"""A policy that was compiled is given again while nothing that it hangs on has changed, and never otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest

from policy import data, errors
from policy.compile import plan
from policy.compile.artefacts import Artefacts
from policy.compile.cache import Cache
from policy.grants.effective import Effective
from policy.host import GrantedPath, HostFacts, NetworkFacts, RunscFacts
from policy.manifest.agent import Manifest
from policy.rules import nine
from tests.unit.policy.compile import sample

MORE = '[permissions.filesystem]\nread = ["/opt/a"]\n[permissions.executables]\nallow = ["/usr/bin/cat"]'
Arguments = dict[str, Any]


def unchecked(effective: Effective, *rest: object) -> None:
    """Every policy may be used."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Manifest]:
    """The manifests that were really compiled."""
    seen: list[Manifest] = []
    real = plan.compile

    def counted(effective: Effective, manifest: Manifest, host: HostFacts, **rest: Any) -> Artefacts:
        seen.append(manifest)
        return real(effective, manifest, host, **rest)

    monkeypatch.setattr(plan, "compile", counted)
    return seen


def arguments(found: Manifest | None = None, **changes: Any) -> Arguments:
    manifest = found or sample.manifest(more=MORE)
    return {
        "effective": nine.requested(manifest, roles=data.roles()),
        "manifest": manifest,
        "host": sample.host(),
        "package_digest": "d" * 64,
        "parent": None,
        **changes,
    }


def test_same_decision_is_compiled_once_from_equal_values(compiled: list[Manifest]) -> None:
    cache = Cache(unchecked)
    first = cache.compile(**arguments())
    assert cache.compile(**arguments()) is first
    assert len(compiled) == 1
    assert first == plan.compile(**arguments())


OTHER_MEMORY: dict[str, Any] = {
    "memory_available_mb": 1,
    "memory_mb": 2,
    "disk_free_mb": 3,
    "pids_free": 4,
    "cpus": 5,
    "kernel": "7",
}


def test_what_compiler_does_not_look_at_makes_no_difference(compiled: list[Manifest]) -> None:
    cache = Cache(unchecked)
    cache.compile(**arguments())
    changed = arguments(host=sample.host(**OTHER_MEMORY))
    assert cache.compile(**changed) == plan.compile(**changed)
    assert len(compiled) == 2  # the first, and the one beside the cache


def _closure_with_more(path: str) -> Any:
    held = sample.closure(path, path)
    return dataclasses.replace(held, files=(*held.files, dataclasses.replace(held.files[0], path="/usr/lib/more.so")))


CHANGES: dict[str, Callable[[], Arguments]] = {
    "package": lambda: arguments(package_digest="e" * 64),
    "effective": lambda: arguments(
        effective=dataclasses.replace(
            arguments()["effective"], executables=type(arguments()["effective"].executables)()
        )
    ),
    "parent": lambda: arguments(parent=Effective.top()),
    "manifest": lambda: arguments(sample.manifest(more=MORE, resources="memory_mb = 512")),
    "architecture": lambda: arguments(host=sample.host(arch="aarch64")),
    "runsc": lambda: arguments(host=sample.host(runsc=RunscFacts("/usr/bin/runsc", "20250101.0", "f" * 64))),
    "room": lambda: arguments(host=sample.host(room_mb=8)),
    "runtime": lambda: arguments(
        host=sample.host(runtimes={"python3": sample.closure("python3", "/usr/bin/python3.12")})
    ),
    "program": lambda: arguments(host=sample.host(executables={"/usr/bin/cat": _closure_with_more("/usr/bin/cat")})),
    "path": lambda: arguments(host=sample.host(granted={"/opt/a": GrantedPath("/opt/a", "file")})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_what_it_hangs_on_is_compiled_anew(change: str, compiled: list[Manifest]) -> None:
    cache = Cache(unchecked)
    before = cache.compile(**arguments())
    changed = cache.compile(**CHANGES[change]())
    assert len(compiled) == 2
    assert changed == plan.compile(**CHANGES[change]())
    # The older of the two is still there, unless it had the same name: then the newer has taken its place.
    assert cache.compile(**arguments()) == before
    assert len(compiled) == (4 if change == "manifest" else 3)


def test_policy_of_another_network_stack_is_compiled_anew() -> None:
    """The operator may change it while the supervisor lives."""
    cache = Cache(unchecked)
    found = sample.manifest(network="full", more=MORE)
    stacks: tuple[Literal["sandbox", "host"], ...] = ("sandbox", "host", "sandbox")
    for stack in stacks:
        made = cache.compile(**arguments(found, host=sample.host(network=NetworkFacts("", "", stack))))
        assert made.json("runtime.json")["flags"]["--network"] == stack


def _numbered(number: int) -> Arguments:
    return arguments(package_digest=f"{number:064x}")


def test_it_holds_so_many_and_gives_up_what_was_used_longest_ago(compiled: list[Manifest]) -> None:
    cache = Cache(unchecked, entries=2)
    for number in (1, 2, 1, 3, 1, 2):
        cache.compile(**_numbered(number))
    # 2 went when 3 came, since 1 had been used after it.
    assert len(compiled) == 4
    assert len(cache._kept) == 2


def test_it_holds_so_many_bytes(compiled: list[Manifest]) -> None:
    one = sum(map(len, plan.compile(**_numbered(1)).files.values()))
    cache = Cache(unchecked, size=2 * one)
    for number in range(1, 20):
        cache.compile(**_numbered(number))
        assert cache._held == sum(kept.size for kept in cache._kept.values()) <= cache.size
    assert len(cache._kept) == 2
    small = Cache(unchecked, size=one - 1)
    small.compile(**_numbered(1))
    assert (small._kept, small._held) == ({}, 0)


def test_what_check_refuses_is_not_kept_and_what_it_passed_is_not_asked_again() -> None:
    asked: list[object] = []

    def check(effective: Effective, *rest: object) -> None:
        asked.append(rest[-1])
        if len(asked) == 1:
            raise errors.ProofError("refused")

    cache = Cache(check)
    with pytest.raises(errors.ProofError):
        cache.compile(**arguments())
    assert not cache._kept
    for _ in range(3):
        assert cache.compile(**arguments()) is asked[-1]
    assert len(asked) == 2


def test_error_is_not_kept() -> None:
    cache = Cache(unchecked)
    for _ in range(2):
        with pytest.raises(errors.NotEnforceableError):
            cache.compile(**arguments(host=sample.host(runsc=None)))
    assert not cache._kept
    cache.compile(**arguments())
    assert len(cache._kept) == 1
