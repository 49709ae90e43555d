"""One writer a file system: told apart by its device, under each of its names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from policy import errors
from policy.grants.effective import Effective
from policy.grants.paths import FilesystemGrants
from policy.host import GrantedPath
from policy.rules import writers
from policy.rules.writers import Writer, WrittenPlace
from tests.unit.policy.compile import sample

DATA = WrittenPlace("device 7", "/srv/data")
SHARED = structs.replace(DATA, shared=True)


def test_places_are_the_granted_devices() -> None:
    filesystem = FilesystemGrants.of("host", write=["/srv/data", "/srv/gone"], shared=True)
    effective = replace(Effective.bottom(), filesystem=filesystem)
    host = sample.host(granted={"/srv/data": GrantedPath("/srv/data", "dir", 8, device=7)})
    assert writers.of(effective, host) == (SHARED,)


@pytest.mark.parametrize("places", [(), (DATA,), (DATA, WrittenPlace("device 8", 'a"b', shared=True))])
def test_label_field_is_read_as_written(places: tuple[WrittenPlace, ...]) -> None:
    assert writers.decode(writers.encode(places)) == places


def test_label_field_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected"):
        writers.decode('[{"key": 1}]')


def test_another_device_is_no_conflict() -> None:
    writers.check([DATA], [Writer("a", (WrittenPlace("device 8", "/srv/data"),)), Writer("b", ())])


def test_shared_on_both_sides_lets_two_write() -> None:
    writers.check([SHARED], [Writer("a", (SHARED,))])


@pytest.mark.parametrize(
    ("mine", "other", "message", "hint"),
    [
        (DATA, Writer("a", (DATA,)), "run `a` writes `/srv/data` now", "shared = true"),
        (DATA, Writer("a", (SHARED,)), "run `a` writes `/srv/data` now", "shared = true"),
        (SHARED, Writer("a", (DATA,)), "`/srv/data` is shared, and run `a` writes it without", "wait until that run"),
        (
            DATA,
            Writer("a", (structs.replace(DATA, name="/mnt"),)),
            "run `a` writes `/srv/data` now, under the name `/mnt`",
            "wait",
        ),
        (DATA, Writer("", (structs.replace(DATA, name="/mnt"),)), "another run writes `/srv/data` now", "wait"),
        (DATA, Writer("a", (DATA,), left=True), "run `a`, which wrote `/srv/data`, was killed", "run it again"),
    ],
)
def test_second_writer_is_refused_by_name(mine: WrittenPlace, other: Writer, message: str, hint: str) -> None:
    with pytest.raises(errors.PathInUseError) as e:
        writers.check([mine], [other], "agent.toml:3")
    assert e.value.message.startswith(message)
    assert hint in e.value.hint
    assert ("/mnt" in e.value.message) == ("/mnt" in message)
    assert e.value.where == "agent.toml:3"
