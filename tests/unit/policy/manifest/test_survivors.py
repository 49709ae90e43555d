"""Kill mutants of the manifest's parser that no other test detects (docs/mutants.md)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from policy import errors
from policy.manifest import agent, digests, fields, hosts, parse
from policy.manifest import text as manifest_text
from policy.manifest.tools import secret_scan

HEAD = '[agent]\nid = "a"\nname = "a"\nversion = "1"\nruntime = "python3"\nentry = "main.py"\n'


def test_item_of_list_has_its_own_line() -> None:
    read = parse.parse(f'{HEAD}[permissions.filesystem]\nread = [\n"/a",\n"/b",\n]\n'.encode())
    assert read.where("permissions.filesystem.read") == "agent.toml:8"
    assert read.where("permissions.filesystem.read[0]") == "agent.toml:9"
    assert read.where("permissions.filesystem.read[1]") == "agent.toml:10"


@pytest.mark.parametrize("number", [2 * fields.LIST_ITEMS, 2 * fields.LIST_ITEMS + 1])
def test_list_of_calls_is_twice_as_long_as_another(number: int) -> None:
    assert fields.LONG_LIST.metadata != fields.LIST.metadata
    listed = ", ".join(f'"c{n}"' for n in range(number))
    text = f"{HEAD}[permissions.syscalls]\nallow = [{listed}]\n".encode()
    if number == 2 * fields.LIST_ITEMS:
        assert len(parse.parse(text).permissions.syscalls.allow) == number
        return
    with pytest.raises(errors.ManifestError):
        parse.parse(text)


@pytest.mark.parametrize("period", [1, 2, 4, 8, 16, 32])
def test_digest_that_repeats_is_placeholder_and_told_so(period: int) -> None:
    part = "0123456789abcdeffedcba9876543210"[:period]
    reason = digests.filler(digests.PREFIX + part * (64 // period))
    assert reason == (f"it repeats `{part}`" if period > 1 else "it is `0` throughout")
    assert digests.filler(digests.of(b"something")) == ""
    assert digests.filler(digests.of(b"")) == "it is the digest of nothing"


def refusal(host: str) -> str:
    with pytest.raises(PydanticCustomError) as caught:
        hosts.check(host)
    return str((caught.value.context or {})["message"])


@pytest.mark.parametrize(("label", "accepted"), [("a" * 63, True), ("a" * 64, False), ("a", True), ("ab", True)])
def test_label_has_1_to_63_characters(label: str, accepted: bool) -> None:
    host = f"{label}.example"
    if accepted:
        assert hosts.check(host) == host
    else:
        assert "bad label" in refusal(host)


@pytest.mark.parametrize("host", ["dead:", ":", "1:", "::1%eth0x:", "fe80:"])
def test_what_looks_like_address_is_judged_as_one(host: str) -> None:
    assert "address" in refusal(host)


@pytest.mark.parametrize("name", ["bu\u0308cher", "b\u00dccher", "a\u200bb"])
def test_label_decodes_to_name_in_its_one_form(name: str) -> None:
    label = "xn--" + name.encode("punycode").decode().lower()
    assert refusal(f"{label}.example")


@pytest.mark.parametrize(
    "ports",
    [
        [80, 80], ["80-90", 90], [90, "80-90"], ["80-90", 80], [80, "80-90"], ["80-90", "85-95"], ["85-95", "80-90"],
        [0], [65536], ["0-1"], ["65535-65536"], ["2-1"], ["1-1"], [True], ["1"], [1.0], [None], [[1, 2]], [], "80",
        list(range(1, 66)), ((80, True),), ((80, "90"),), ((80, 90, 91),), ((90, 80),), ((0, 1),),
    ],
)  # fmt: skip
def test_ports_none_or_twice_are_refused(ports: Any) -> None:
    with pytest.raises(PydanticCustomError):
        hosts.port_ranges(ports)


@pytest.mark.parametrize(
    ("ports", "pairs"),
    [
        ([1], ((1, 1),)), ([65535], ((65535, 65535),)), (["1-65535"], ((1, 65535),)), ([80, 79], ((79, 79), (80, 80))),
        (["80-90", 91], ((80, 90), (91, 91))), ([91, "80-90"], ((80, 90), (91, 91))), (((80, 90),), ((80, 90),)),
        (list(range(1, 65)), tuple((n, n) for n in range(1, 65))),
    ],
)  # fmt: skip
def test_ports_are_sorted_pairs(ports: Any, pairs: Any) -> None:
    assert hosts.port_ranges(ports) == pairs


@pytest.mark.parametrize(("name", "accepted"), [("x", True), ("y" * 64, True), ("y" * 65, False), ("a b", False)])
def test_section_of_ones_own_has_1_to_64_plain_characters(name: str, accepted: bool) -> None:
    text = f'{HEAD}["{name}"]\nkey = 1\n'.encode()
    if accepted:
        assert parse.parse(text).unknown_sections == (name,)
        return
    with pytest.raises(errors.ManifestError, match="is not accepted"):
        parse.parse(text)


def test_each_default_says_why_it_is_one() -> None:
    told = {key: reason for key, _, reason in parse.defaults_applied(parse.parse(HEAD.encode()))}
    assert told["resources.network"] == "Covenant's default; sign wants it written"
    assert told["resources.swap_mb"] == "no swap unless it is written"
    assert told["resources.pids_max"] == "default ceiling"
    assert told["resources.cpu_millis"] == "default ceiling: one core"
    assert told["resources.cpu_weight"] == "default share"
    assert told["resources.net_bps"] == "absent: not limited"
    assert told["spawn.allowed"] == "not granted unless it is written"
    assert told["lifetime"] == "absent: the run ends with its task"


def test_first_hundred_findings_are_listed_and_rest_counted() -> None:
    text = HEAD + "".join(f"[permissions.filesystem.x{n}]\n" for n in range(105))
    with pytest.raises(errors.ManifestError) as caught:
        parse.parse(text.encode())
    assert len(caught.value.details["errors"]) == 100
    assert "and 104 more" in caught.value.hint


@pytest.mark.parametrize(("key", "near"), [("mem", "memory_mb"), ("disk_m", "disk_mb"), ("me", ""), ("zzz", "")])
def test_beginning_of_key_is_enough_to_guess_it(key: str, near: str) -> None:
    with pytest.raises(errors.ManifestError) as caught:
        parse.parse(f"{HEAD}[resources]\n{key} = 1\n".encode())
    assert caught.value.hint.startswith(f"did you mean `{near}`?" if near else "known here:")


BODY = 'name = "a"\nversion = "1"\n'


def findings(text: str) -> list[str]:
    with pytest.raises(errors.ManifestError) as caught:
        parse.parse(text.encode())
    return [one["message"] for one in caught.value.details.get("errors", ())] or [caught.value.message]


@pytest.mark.parametrize("runtime", ["rust-bin", "python3", "node"])
def test_each_runtime_of_this_machine_needs_entry(runtime: str) -> None:
    text = f'[agent]\nid = "a"\n{BODY}runtime = "{runtime}"\n'
    assert findings(text) == [f"`agent.entry` is missing, which the runtime `{runtime}` needs"]


@pytest.mark.parametrize("policy", ["operator-prompt", "auto-deny", "auto-once"])
def test_each_approval_policy_is_known(policy: str) -> None:
    text = f'[agent]\nid = "a"\n{BODY}runtime = "hermes"\n[hermes]\napproval_policy = "{policy}"\n'
    assert parse.parse(text.encode()).hermes.approval_policy == policy
    assert findings(text.replace(policy, policy[:-1])) == [f"approval_policy `{policy[:-1]}` is not known"]


@pytest.mark.parametrize(("ports", "bad"), [("[443, 80]", "80"), ('["443-444"]', "443-444"), ("[443, 8443]", "8443")])
def test_port_outside_mode_is_named(ports: str, bad: str) -> None:
    text = f'{HEAD}[resources]\nnetwork = "outbound-https-only"\n[[permissions.network]]\nhost = "a.example"\n'
    told = findings(f'{text}ports = {ports}\nprotocol = "tls"\n')
    assert told == [f"port `{bad}` is outside the network mode `outbound-https-only`"]


@pytest.mark.parametrize(
    ("table", "count"),
    [("ttl_seconds = 5\n", 0), ("unlimited = true\n", 0), ("ttl_seconds = 5\nunlimited = true\n", 1), ("", 1)],
)
def test_lifetime_has_one_end(table: str, count: int) -> None:
    text = f"{HEAD}[lifetime]\n{table}"
    if not count:
        assert parse.parse(text.encode()).wrote("lifetime")
        return
    assert len(findings(text)) == count


@pytest.mark.parametrize(("opened", "deep"), [(16, False), (17, True)])
def test_brackets_are_counted_where_they_are_open(opened: int, deep: bool) -> None:
    closed = "\n".join(f"x{n} = [[1], [2]]" for n in range(12))
    text = f"{HEAD}[own]\n{closed}\nz = {'[' * opened}{']' * opened}\n"
    if not deep:
        assert parse.parse(text.encode()).unknown_sections == ("own",)
        return
    with pytest.raises(errors.ManifestSyntaxError, match="nested `17` deep") as caught:
        parse.parse(text.encode())
    line = text.split("\n").index(text.split("\n")[-2]) + 1
    assert caught.value.where == f"agent.toml:{line}:{len('z = ') + 17}"


def test_first_hidden_character_is_one_shown() -> None:
    with pytest.raises(errors.ManifestSyntaxError) as caught:
        parse.parse(f"{HEAD}# a\u202e b\u200b\n".encode())
    assert "U+202E" in caught.value.message
    assert caught.value.where == "agent.toml:7:4"


@pytest.mark.parametrize("character", ["\u0378", "\ue000", "\u00ad", "\u2028", "\u0600"])
def test_string_holds_no_character_that_nobody_knows(character: str) -> None:
    with pytest.raises(errors.ManifestError, match="hidden character"):
        parse.parse(HEAD.replace('name = "a"', f'name = "a{character}"').encode())


@pytest.mark.parametrize(("value", "kind"), [([1], "an array"), ([{}], "an array of tables"), ([], "an array")])
def test_what_stands_in_place_of_number_is_told_by_its_kind(value: Any, kind: str) -> None:
    assert manifest_text.kind_of(value) == kind


@pytest.mark.parametrize(("bits", "shown"), [(128, "`"), (129, "an integer of 129 bits")])
def test_endless_number_is_told_by_its_size(bits: int, shown: str) -> None:
    assert manifest_text.quote(2 ** (bits - 1)).startswith(shown)


@pytest.mark.parametrize(("length", "cut"), [(120, False), (121, True)])
def test_quote_has_at_most_120_characters(length: int, cut: bool) -> None:
    shown = manifest_text.visible("x" * length)
    assert len(shown) == 120
    assert shown.endswith("…") == cut


@pytest.mark.parametrize(
    ("key", "most"),
    [("cpu_ms_per_task", 604_800_000), ("net_bps", 1_000_000_000_000), ("io_read_bps", 1_000_000_000_000)],
)
def test_greatest_value_of_limit(key: str, most: int) -> None:
    def read(value: int) -> int | None:
        parsed = parse.parse(f"{HEAD}[resources]\n{key} = {value}\n".encode())
        assert isinstance(parsed.resources, agent.Resources)
        found: int | None = getattr(parsed.resources, key)
        return found

    assert read(most) == most
    with pytest.raises(errors.ManifestError):
        read(most + 1)


def test_plus_sign_does_not_part_what_is_random() -> None:
    # Runs of 16 between the signs: neither half is long enough by itself.
    assert secret_scan.looks_secret("aB3dE5gH7jK9mN1p+qR2sT4vW6xY8zA0")
    assert not secret_scan.looks_secret("aB3dE5gH7jK9mN1p qR2sT4vW6xY8zA0")
    assert secret_scan.looks_secret("aB3dE5gH7/jK9mN1p+qR2sT4-vW6xY8z_A0cD2fG4hJ6")
