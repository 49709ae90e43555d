"""Check hostile artefacts under which the kernel would allow more than a reader of them expects: none is proved.

tests/kernel/test_nft_reads_more.py gives the same texts to nft.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from policy import errors, prove
from policy.explain import diff
from policy.grants import restore
from tests import proof_kit
from tests.proof_kit import Case, Documents
from tests.unit.policy.compile import sample

Edit = Callable[[Documents], None]


@functools.cache
def compiled(name: str) -> Case:
    return proof_kit.CASES[name]()


def refused(name: str, edit: Edit) -> str:
    """Return the refusal of the artefacts after this edit; without the edit they are proved."""
    case = compiled(name)
    case.prove()
    with pytest.raises((errors.ProofError, errors.ArtefactError)) as raised:
        case.prove(case.falsified(edit))
    return str(raised.value)


def name_set(d: Documents, protocol: str) -> str:
    """Return the IPv4 set of the first name that is granted for this protocol."""
    grants = d["network.json"]["grants"]
    found: str = next(g["sets"][0] for g in grants if g["kind"] == "name" and g["protocol"] == protocol)
    return found


def chain(d: Documents, name: str, *lines: str) -> None:
    """Add a chain before all others."""
    body = "".join(f"\t\t{line}\n" for line in lines)
    d.nft("\tchain refuse {\n", f"\tchain {name} {{\n{body}\t}}\n\tchain refuse {{\n")


# --- rules that nft reads otherwise than they look ----------------------------------------------------------------


def test_reset_ends_tcp_alone() -> None:
    """nft writes `meta l4proto tcp` before a reset: all other packets reach the chain's policy, here accept."""

    def edit(d: Documents) -> None:
        d.nft("hook forward priority filter; policy drop;", "hook forward priority filter; policy accept;")
        d.nft('\t\tcounter name "refused_other" drop\n', '\t\tcounter name "refused_other" reject with tcp reset\n')
        d.nft('\t\tiifname "agent0" goto refuse\n\t}\n\tchain input', "\t\treject with tcp reset\n\t}\n\tchain input")

    assert "for which there is no grant" in refused("network", edit)


@pytest.mark.parametrize("verdict", ["accept", "return", "goto granted", "jump granted"])
def test_limit_never_gives(verdict: str) -> None:
    """A packet may exceed one limit and not another of the same rate: two directions in one bucket exceed it."""

    def edit(d: Documents) -> None:
        chain(d, "more", f"limit rate over 125000 bytes/second {verdict}")
        for match in ("iifname", "oifname"):
            d.nft("\t\tct state", f'\t\t{match} "agent0" jump more\n\t\tct state', count=1)

    assert "a limit that does anything but drop" in refused("rest", edit)


# --- names that lead where no name leads --------------------------------------------------------------------------


def test_name_leads_to_no_private_address_for_sake_of_another() -> None:
    """An address of all names is dropped, like an address of no name; one of the second name alone would pass."""

    def edit(d: Documents) -> None:
        chain(
            d,
            "more",
            f"ip daddr @{name_set(d, 'tls')} drop",
            f"ip daddr @{name_set(d, 'tcp')} tcp dport {{ 22 }} accept",
        )
        d.nft(
            "\tchain granted {\n",
            "\tchain granted {\n\t\tip daddr @x4 jump more\n",
        )

    assert "what an address that is not public may" in refused("network", edit)


@pytest.mark.parametrize("left", ["tcp", "udp"])
def test_resolver_asked_by_one_protocol_alone_is_no_closed_one(left: str) -> None:
    def edit(d: Documents) -> None:
        closed = {"tcp": "udp", "udp": "tcp"}[left]
        d.nft(f'\t\tiifname "agent0" {closed} dport {{ 53 }} accept\n', "")

    assert "by one of tcp and udp alone" in refused("network", edit)


def test_every_answer_counts_for_rate() -> None:
    """The resolver has another uid than the TLS gate, and its answers were once not limited."""

    def edit(d: Documents) -> None:
        d.nft(
            '\t\toifname "agent0" jump downward\n\t\tct state established,related accept\n\t\ticmpv6',
            '\t\toifname "agent0" meta skuid 64998 jump downward\n\t\tct state established,related accept\n\t\ticmpv6',
        )

    assert "by at any rate" in refused("rest", edit)


def test_what_comes_to_tls_gate_counts_for_rate() -> None:
    """This rule accepts exactly the redirected packets before the limit."""
    gate = '\t\tiifname "agent0" tcp dport { 8443 } ct status dnat accept\n'

    def edit(d: Documents) -> None:
        d.nft(gate, "")
        head = "hook input priority filter; policy drop;\n"
        d.nft(head, head + gate)

    assert "by at any rate" in refused("rest", edit)


@pytest.mark.parametrize(
    "head",
    [
        "\tchain upward {\n",
        "\tchain granted {\n",
        "hook forward priority filter; policy drop;\n",
        "hook output priority filter; policy drop;\n",
        "priority dstnat; policy accept;\n",
    ],
)
@pytest.mark.parametrize("verdict", ["accept", "return"])
def test_no_other_hook_asks_for_what_was_redirected(head: str, verdict: str) -> None:
    message = refused("rest", lambda d: d.nft(head, f"{head}\t\tct status dnat {verdict}\n"))
    assert "only hook input may ask" in message or ("upward" in head and "hook input lets" in message)


@pytest.mark.parametrize("match", ['iifname "d{}"', 'oifname "d{}"', "meta skuid {}"])
def test_many_devices_or_users_do_not_stop_machine(match: str) -> None:
    head = "hook output priority filter; policy drop;\n"
    rules = "".join(f"\t\t{match.format(at)} drop\n" for at in range(4000))
    assert "of which a gateway has a few" in refused("rest", lambda d: d.nft(head, head + rules))


# --- attacks that failed ---------------------------------------------------------------------------------------------

FAILED: dict[str, tuple[str, str]] = {
    "neighbour discovery is forwarded": (
        "hook forward priority filter; policy drop;\n",
        "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept",
    ),
    "the TLS gate may speak udp": (
        "hook output priority filter; policy drop;\n",
        'oifname "uplink0" meta skuid 64998 meta l4proto udp accept',
    ),
    "the uplink reaches the TLS gate": (
        "hook input priority filter; policy drop;\n",
        'iifname "uplink0" ct status dnat accept',
    ),
    "answers return before the limit": ("\tchain upward {\n", "ct state established,related return"),
    "one uid returns before the limit": ("\tchain downward {\n", "meta skuid 64998 return"),
    "one of the resolver's protocols is led astray": (
        "priority dstnat; policy accept;\n",
        'iifname "agent0" udp dport { 53 } redirect to :53',
    ),
}


@pytest.mark.parametrize("attack", FAILED)
def test_attack_that_failed_still_fails(attack: str) -> None:
    head, line = FAILED[attack]
    assert refused("rest", lambda d: d.nft(head, f"{head}\t\t{line}\n"))


# --- a directory that an enemy wrote, its effective.json with it -----------------------------------------------------


def directory(name: str, edit: Edit) -> None:
    """Prove a directory as ``covenant policy prove DIR`` does: by the grants in it."""
    artefacts = compiled(name).falsified(edit)
    prove.prove(restore.effective(artefacts.json("effective.json")["grants"]), artefacts)


def granted(d: Documents) -> Any:
    return d["effective.json"]["grants"]


def a_program_in_a_grant(d: Documents) -> None:
    d["mounts.json"]["root"]["closures"][0]["entry"] = d["config.json"]["process"]["args"][0] = "/opt/a/evil"


def a_program_of_the_package(d: Documents) -> None:
    d["mounts.json"]["root"]["closures"][1]["entry"] = "/workspace/evil"


def half_a_character(d: Documents) -> None:
    """Insert a lone surrogate, which runsc reads as U+FFFD and the supervisor as a byte."""
    path = "/opt/\udc80"
    for mount in (*d["mounts.json"]["mounts"], *d["config.json"]["mounts"]):
        mount.update({key: path for key in ("destination", "source") if mount[key] == "/opt/a"})
    for point in d["mounts.json"]["root"]["mount_points"]:
        point["path"] = path if point["path"] == "/opt/a" else point["path"]
    granted(d)["filesystem"]["read"][0] = path
    rules = d["provenance.json"]["rules"]
    rules[f"mounts.json:{path}"] = rules.pop("mounts.json:/opt/a")


DIRECTORIES: dict[str, Edit] = {
    "a weight that is a float": lambda d: granted(d)["resources"].update(cpu_weight=37.0),
    "a life that is a boolean": lambda d: granted(d)["lifetime"].update(ttl_seconds=False),
    "a depth that is a boolean": lambda d: granted(d)["spawning"].update(max_depth=False, max_descendants=False),
    "an interpreter in a grant": a_program_in_a_grant,
    "a granted program of the package": a_program_of_the_package,
    "half a character in a path": half_a_character,
}


@pytest.mark.parametrize("fault", DIRECTORIES)
def test_directory_that_means_two_things_is_not_proved(fault: str) -> None:
    directory("much", lambda d: None)
    with pytest.raises(errors.ArtefactError):
        directory("much", DIRECTORIES[fault])


# --- ceilings that differ by their holder ---------------------------------------------------------------------------


def memory_of_version_1(d: Documents) -> None:
    for one in d["cgroup.json"]["v1"]:
        if one["file"].startswith("memory.") and one["file"].endswith("limit_in_bytes"):
            one["value"] = str(int(one["value"]) + (1 << 30))


def test_higher_ceiling_of_one_holder_widens() -> None:
    case = compiled("much")
    new = case.falsified(memory_of_version_1)
    found = diff.compare_artefacts(case.artefacts, new)
    assert found.widens
    assert [row.added for row in found.rows] == [("v1: memory_mb 1124 MiB, was 100 MiB",)]
    back = diff.compare_artefacts(new, case.artefacts)
    assert not back.widens
    assert [row.removed for row in back.rows] == [("v1: memory_mb 1124 MiB, now 100 MiB",)]


def test_child_lies_within_by_every_holder() -> None:
    case = compiled("least")
    child = case.falsified(memory_of_version_1)
    prove.within(case.artefacts, case.artefacts, remaining_seconds=60)
    with pytest.raises(errors.ProofError, match="v1: memory_mb"):
        prove.within(child, case.artefacts, remaining_seconds=60)
    prove.within_sums([case.artefacts], case.artefacts)
    with pytest.raises(errors.ProofError, match="memory_mb"):
        prove.within_sums([child], case.artefacts)
    with pytest.raises(errors.ProofError, match="memory_mb"):
        prove.within_sums([child], child, own={"memory_mb": 1})


# --- manifests at the edge, which parse and must be proved ----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rounding"),
    [
        ({"more": '[permissions.syscalls]\ndeny = ["clone", "fork", "vfork"]'}, None),
        ({"network": "full", "resources": "net_bps = 1000000000000"}, "highest-rate"),
        ({"network": "off", "resources": "net_bps = 1000000000000"}, "no-network-rate"),
    ],
    ids=["no clone to fall back to", "a rate above the kernel's", "a rate of nothing"],
)
def test_manifest_at_edge_is_proved(text: dict[str, str], rounding: str | None) -> None:
    used = proof_kit.case(sample.manifest(**text)).prove().roundings
    assert ("enosys" in used["syscalls"]) is (rounding is not None)
    rates = set(used["resources"]) & {"highest-rate", "no-network-rate"}
    assert rates == ({rounding} if rounding else set())


def test_rate_above_kernels_is_held_and_not_left_out() -> None:
    case = proof_kit.case(sample.manifest(network="full", resources="net_bps = 1000000000000"))

    def instead(rate: int) -> Edit:
        return lambda d: d.nft("over 18000000000 ", f"over {rate} ")

    for rate in (17999999999, 18000000001, 1000000000000):
        with pytest.raises(errors.ArtefactError, match="net_bps"):
            case.prove(case.falsified(instead(rate)))


@pytest.mark.parametrize(("made", "other"), [("network", "host stack"), ("host stack", "network")])
def test_policy_of_network_stack_that_operator_has_not_chosen_is_not_proved(made: str, other: str) -> None:
    """Compile the same manifest for two machines: each result is proved for its own machine alone."""
    compiled(made).prove()
    with pytest.raises(errors.ProofError, match="network stack"):
        compiled(other).prove(compiled(made).artefacts)
