"""Rules laid out in a line: what they do to ports, to which destinations, and what cannot be told of them."""

from __future__ import annotations

import itertools

import pytest

from policy import errors
from policy.decompile.network import flows, nft, packets
from policy.decompile.network.flows import ALL, POLICY, Flow, PacketKind
from policy.decompile.network.packets import ACCEPT, DROP, Packet
from policy.grants.sets import addresses
from tests.unit.policy.decompile.network.test_nft import SET, chain, table

BOTH = ("\tset n4_x {\n\t\ttype ipv4_addr\n\t\tflags timeout\n\t\tsize 1024\n\t}\n", SET)


def text_of(*rules: str, policy: str = "drop", more: str = "") -> bytes:
    head = f"type filter hook forward priority filter; policy {policy};"
    return table(*BOTH, more, chain(head, *rules, name="forward"))


def forward(*rules: str, policy: str = "drop", more: str = "") -> nft.Table:
    return nft.parse(text_of(*rules, policy=policy, more=more))


def line(number: int | None, *rules: str, policy: str = "drop", more: str = "") -> str | None:
    """The rule that a number stands for; the policy for 0."""
    if not number:
        return None if number is None else "policy"
    return text_of(*rules, policy=policy, more=more).decode().split("\n")[number - 1].strip()


def flow(*rules: str, policy: str = "drop", more: str = "") -> Flow:
    return Flow.of(forward(*rules, policy=policy, more=more), PacketKind("forward", "tcp", iif="a", oif="b"))


def test_hook_without_chain_accepts() -> None:
    found = Flow.of(nft.parse(table()), PacketKind("output", "tcp"))
    assert found.accepted(frozenset()) == ALL
    assert found.open()
    assert found.barrier() is None
    assert packets.verdict(nft.parse(table()), "output", Packet(1)) == ACCEPT


def test_what_no_rule_ends_ends_by_policy() -> None:
    found = flow("tcp dport { 80 } accept").ports(frozenset())
    assert found == {ACCEPT: ((80, 80),), POLICY: ((0, 79), (81, 65535))}


def test_first_rule_that_matches_decides() -> None:
    found = flow("tcp dport { 80-90 } drop", "tcp dport { 85-95 } accept").ports(frozenset())
    assert found[ACCEPT] == ((91, 95),)
    assert found[DROP] == ((80, 90),)


def test_jump_comes_back_and_goto_does_not() -> None:
    more = chain("tcp dport { 80 } return", "tcp dport { 81 } accept", name="more")
    assert flow("jump more", "tcp dport { 80-82 } accept", more=more).accepted(frozenset()) == ((80, 82),)
    assert flow("goto more", "tcp dport { 80-82 } accept", more=more).accepted(frozenset()) == ((81, 81),)
    conditional = flow("tcp dport { 81 } goto more", "tcp dport { 80-82 } accept", more=more)
    assert conditional.accepted(frozenset()) == ((80, 82),)


def test_only_sets_that_hold_destination_matter() -> None:
    found = flow("ip daddr @a4_x tcp dport { 80 } accept", "ip daddr @n4_x tcp dport { 81 } accept")
    assert found.accepted(frozenset()) == ()
    assert found.accepted(frozenset({"a4_x", "elsewhere"})) == ((80, 80),)
    assert found.accepted(frozenset({"a4_x", "n4_x"})) == ((80, 81),)


def test_chain_for_one_set_called_from_chain_for_another_wants_both() -> None:
    more = chain("ip daddr @n4_x accept", name="more")
    found = flow("ip daddr @a4_x jump more", more=more)
    assert found.accepted(frozenset({"n4_x"})) == found.accepted(frozenset({"a4_x"})) == ()
    assert found.accepted(frozenset({"a4_x", "n4_x"})) == ALL


ENDS = chain("drop", name="ends")


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        (["drop", "accept"], "drop"),
        (["reject with icmpx port-unreachable", "drop"], "reject with icmpx port-unreachable"),
        (["tcp dport { 80 } drop", "drop"], "drop"),
        (["tcp dport { 80 } drop", "tcp dport { 81 } accept", "drop"], None),
        (["ip daddr @a4_x accept", "drop"], None),
        (["jump ends", "accept"], "drop"),
        (["tcp dport { 80 } jump ends", "accept"], None),
        (["tcp dport { 80 } jump ends", "reject with tcp reset"], "reject with tcp reset"),
        (["tcp dport { 80 } return", "drop"], "policy"),
        (["return", "accept"], "policy"),
        ([], "policy"),
    ],
)
def test_barrier_is_rule_that_drops_all_before_one_accepts(rules: list[str], found: str | None) -> None:
    assert line(flow(*rules, more=ENDS).barrier(), *rules, more=ENDS) == found


def test_return_in_middle_is_no_barrier() -> None:
    more = chain("tcp dport { 80 } return", "drop", name="more")
    found = flow("jump more", "accept", more=more)
    assert found.barrier() is None
    assert found.accepted(frozenset()) == ((80, 80),)


@pytest.mark.parametrize(
    ("rules", "policy", "is_open"),
    [
        (["accept"], "drop", True),
        (["jump nothing", "accept"], "drop", True),
        (["tcp dport { 80 } drop", "accept"], "drop", False),
        (["drop"], "accept", False),
        ([], "accept", True),
        ([], "drop", False),
        (["return"], "accept", False),
    ],
)
def test_open_is_rule_that_accepts_all_first(rules: list[str], policy: str, is_open: bool) -> None:
    assert flow(*rules, policy=policy, more=chain(name="nothing")).open() is is_open


NOTHING = chain(name="nothing")


@pytest.mark.parametrize(
    ("rules", "policy", "found"),
    [
        (["ip daddr @a4_x accept", "ip daddr @n4_x accept", "drop"], "drop", None),
        (["ip daddr @a4_x drop", "ip daddr @n4_x accept"], "drop", "ip daddr @n4_x accept"),
        (["ip daddr @a4_x drop"], "accept", "policy"),
        (["ip daddr @a4_x return", "accept"], "drop", "ip daddr @a4_x return"),
        (["ip daddr @a4_x jump nothing", "accept"], "drop", "ip daddr @a4_x jump nothing"),
        (["jump nothing", "accept", "drop"], "drop", None),
        (["return", "drop", "accept"], "drop", None),
        (["redirect to :1"], "drop", "redirect to :1"),
    ],
)
def test_rules_are_additive_when_nothing_is_taken_before_it_is_given(
    rules: list[str], policy: str, found: str | None
) -> None:
    odd = flows.unordered(flow(*rules, policy=policy, more=NOTHING), ("accept", "drop"), ())
    assert line(odd, *rules, policy=policy, more=NOTHING) == found


def test_sets_left_out_may_take() -> None:
    found = flow("ip daddr @a4_x drop", "ip daddr @n4_x accept")
    assert flows.unordered(found, ("accept", "drop"), {"a4_x"}) is None


def test_packets_to_destination_come_by_rules_that_nothing_ended_them_before() -> None:
    found = flow("ip daddr @a4_x tcp dport { 80 } accept", "ip daddr @a4_x drop", "ip daddr @n4_x accept")
    places = found.places(["n4_x"])
    assert not found.passes(frozenset({"a4_x"}), places)
    assert found.passes(frozenset(), places)


@pytest.mark.parametrize("rule", ['iifname "a" accept', "meta skuid 1 accept"])
def test_rule_that_asks_for_what_its_hook_does_not_know_is_refused(rule: str) -> None:
    text = table(chain("type filter hook output priority filter; policy drop;", 'iifname "a" accept', name="output"))
    with pytest.raises(errors.ArtefactError, match="does not know"):
        Flow.of(nft.parse(text), PacketKind("output", "tcp", oif="b", uid=1))
    with pytest.raises(errors.ArtefactError, match="does not know"):
        Flow.of(forward("meta skuid 1 accept"), PacketKind("forward", "tcp", iif="a", oif="b"))


def test_chains_that_call_one_another_for_ever_are_refused() -> None:
    found = forward("jump more", more=chain("jump more", name="more"))
    with pytest.raises(errors.ArtefactError, match="too deeply"):
        Flow.of(found, PacketKind("forward", "tcp"))
    with pytest.raises(errors.ArtefactError, match="too deeply"):
        packets.verdict(found, "forward", Packet(1))


def test_chains_called_too_often_are_refused_in_time() -> None:
    # 16 levels that call the next one twice would be 65,536 copies of the last.
    names = [f"c{level}" for level in range(16)]
    calls = "".join(
        chain(*[f"tcp dport {{ {port} }} jump {below}" for port in range(3)], name=name)
        for name, below in itertools.pairwise(names)
    )
    with pytest.raises(errors.ArtefactError, match="too often"):
        flow("jump c0", more=calls + chain("accept", name="c15"))


def test_memberships_cut_whole_line_where_set_begins_or_ends() -> None:
    cut = list(flows.memberships((0, 99), [("a", ((10, 19),)), ("b", ((15, 29), (99, 99)))]))
    assert cut == [
        (0, 9, frozenset()),
        (10, 14, frozenset("a")),
        (15, 19, frozenset("ab")),
        (20, 29, frozenset("b")),
        (30, 98, frozenset()),
        (99, 99, frozenset("b")),
    ]
    assert list(flows.memberships((0, 9), [])) == [(0, 9, frozenset())]
    everything = list(flows.memberships(addresses.ALL[0], [("a", (addresses.ALL[0],))]))
    assert everything == [(*addresses.ALL[0], frozenset("a"))]


@pytest.mark.parametrize(
    ("called", "rules", "wanted"),
    [
        (("tcp dport { 1 } return", "accept"), ("jump d", "drop"), None),
        (("tcp dport { 1 } return", "drop"), ("jump d", "drop"), "drop"),
        (("tcp dport { 1 } return", "drop"), ("jump d",), "policy"),
        (("return", "accept"), ("jump d", "drop"), "drop"),
        (("drop",), ("jump d", "accept"), "drop"),
        (("drop",), ("tcp dport { 1 } jump d", "accept"), None),
        (("tcp dport { 1 } accept",), ("jump d", "drop"), None),
        (("accept",), ("goto d", "drop"), None),
        ((), ("goto d", "accept"), "policy"),
    ],
)
def test_barrier_behind_called_chains(called: tuple[str, ...], rules: tuple[str, ...], wanted: str | None) -> None:
    more = chain(*called, name="d")
    assert line(flow(*rules, more=more).barrier(), *rules, more=more) == wanted


@pytest.mark.parametrize("calls", [packets.MAX_DEPTH, packets.MAX_DEPTH + 1])
def test_chains_call_one_another_16_deep(calls: int) -> None:
    more = "".join(chain(f"jump c{number + 1}", name=f"c{number}") for number in range(1, calls))
    more += chain("accept", name=f"c{calls}")
    if calls == packets.MAX_DEPTH:
        assert flow("jump c1", more=more).accepted(frozenset()) == ALL
        return
    with pytest.raises(errors.ArtefactError, match="too deeply"):
        flow("jump c1", more=more)


def test_policy_accepts_what_no_rule_drops() -> None:
    found = flow("tcp dport { 1 } drop", "tcp dport { 2 } accept", policy="accept")
    assert found.accepted(frozenset()) == ((0, 0), (2, 65535))
    assert flow("tcp dport { 2 } accept", policy="accept").accepted(frozenset()) == ALL
    assert flow("tcp dport { 2 } accept").accepted(frozenset()) == ((2, 2),)
