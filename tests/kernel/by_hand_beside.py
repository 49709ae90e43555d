"""Changes by hand beside the network of a run: at the host, at limits and processes, at files. See by_hand.py."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sandbox.kernel import libc
from tests.kernel import injected
from tests.kernel import planted_bpf as bpf
from tests.kernel.hands import (
    Change,
    caught,
    chain,
    file_of_run,
    gone_on,
    in_mounts,
    ip,
    limit,
    moved,
    old_nat,
    process,
    program,
    rules,
    setting,
    stands,
    stopped,
    stranger,
    tc,
)

OPERATOR = "The host's own: packets of a run still leave by the uplink alone, under the host's address"
LESS = "It only takes away"
MEMORY = "Memory of a process cannot be compared with anything (ADR 0028)"

HOST: Final[dict[str, Change]] = {
    "the host's table without its chain input": caught(
        rules("host", "flush", "chain", "inet", "covenant_uplink", "input")
    ),
    "the host's table without its chain forward": caught(
        rules("host", "flush", "chain", "inet", "covenant_uplink", "forward")
    ),
    "a DNAT of a granted address on the host": caught(
        chain("host", "nat hook prerouting priority -110; policy accept", "ip daddr 93.184.216.34 dnat to 10.8.8.8")
    ),
    "a DNAT by a map of addresses on the host": caught(
        chain(
            "host",
            "nat hook prerouting priority -110; policy accept",
            "dnat to ip daddr map { 93.184.216.34 : 10.8.8.8 }",
        )
    ),
    "another source for what leaves by the uplink": caught(
        chain("host", "nat hook postrouting priority 90; policy accept", 'oifname "eth0" snat to 10.77.0.9')
    ),
    "an accept for the run's device with an earlier priority": caught(
        chain("host", "filter hook forward priority -300; policy accept", 'iifname "<<dev>>" accept')
    ),
    "an accept for all devices of runs": caught(
        chain("host", "filter hook forward priority -300; policy accept", 'iifname "cv-*" accept')
    ),
    "an accept for the run's address": caught(
        chain("host", "filter hook forward priority -300; policy accept", "ip saddr <<own>> accept")
    ),
    "notrack on the host": caught(chain("host", "filter hook prerouting priority -300; policy accept", "notrack")),
    "a mark on the host": caught(
        chain("host", "filter hook prerouting priority -150; policy accept", "meta mark set 7")
    ),
    "packets of the run doubled to another host": caught(
        chain("host", "filter hook prerouting priority -150; policy accept", "ip saddr <<own>> dup to 10.77.0.9")
    ),
    "a netdev chain at the run's device that changes packets": caught(
        chain(
            "host", 'filter hook ingress device "<<dev>>" priority 0; policy accept', "ip daddr set 10.8.8.8", "netdev"
        )
    ),
    "a DNAT in a table of the older iptables": caught(old_nat("93.184.216.34/32")),
    "a routing rule for the run's device": caught(
        ip("host", "rule add iif {dev} lookup 99", "rule delete iif {dev} lookup 99")
    ),
    "a routing rule for the run's address": caught(
        ip("host", "rule add from {own} lookup 99", "rule delete from {own} lookup 99")
    ),
    "a routing rule for the addresses of all runs": caught(
        ip("host", "rule add from 198.18.0.0/15 lookup 99", "rule delete from 198.18.0.0/15 lookup 99")
    ),
    "a queue at the run's device": caught(tc("host", "qdisc add dev {dev} root pfifo", "qdisc del dev {dev} root")),
    "clsact at the run's device": caught(tc("host", "qdisc add dev {dev} clsact", "qdisc del dev {dev} clsact")),
    "an XDP program at the run's device": caught(program("host", bpf.XDP, bpf.AT_XDP, "{dev}", 2)),
    "a program at the ingress of the run's device": caught(
        program("host", bpf.SCHED_CLS, bpf.AT_TCX_INGRESS, "{dev}", -1)
    ),
    "an address at the run's device": caught(
        ip("host", "address add 10.77.5.1/32 dev {dev}", "address del 10.77.5.1/32 dev {dev}")
    ),
    "a route by the run's device": caught(
        ip("host", "route add 10.78.0.0/24 dev {dev}", "route del 10.78.0.0/24 dev {dev}")
    ),
    "a fixed neighbour at the run's device": caught(
        ip(
            "host",
            "neigh add 198.19.0.9 lladdr 02:00:00:00:00:09 nud permanent dev {dev}",
            "neigh del 198.19.0.9 dev {dev}",
        )
    ),
    "rp_filter of the run's device": caught(setting("host", "ipv4/conf/{dev}/rp_filter", "2")),
    "another MTU of the run's device": caught(ip("host", "link set {dev} mtu 1400", "link set {dev} mtu 1500")),
    "a DNAT of an address that is not granted": stands(
        chain("host", "nat hook prerouting priority -110; policy accept", "ip daddr 10.9.9.9 dnat to 10.8.8.8"),
        "No packet of the run goes there",
    ),
    "a DNAT in a table of the older iptables, of an address that is not granted": stands(
        old_nat("10.9.9.9/32"), "No packet of the run goes there"
    ),
    "a DNAT for another device": stands(
        chain("host", "nat hook prerouting priority -110; policy accept", 'iifname "docker0" dnat to 10.8.8.8'),
        "No packet of the run comes by it",
    ),
    "a DNAT of the host's own addresses": stands(
        chain("host", "nat hook prerouting priority -110; policy accept", "fib daddr type local dnat to 10.8.8.8"),
        "The gateway sends nothing to the host itself; docker publishes its ports so",
    ),
    "an accept that names no run": stands(
        chain("host", "filter hook forward priority -300; policy accept", "accept"),
        "A verdict ends one chain alone: the table of runs is asked all the same",
    ),
    "another masquerade": stands(
        chain("host", "nat hook postrouting priority 90; policy accept", 'oifname "eth0" masquerade'),
        "Packets of a run are masqueraded anyway",
    ),
    "a drop for the run's device": stands(
        chain("host", "filter hook forward priority -300; policy accept", 'iifname "<<dev>>" drop'), LESS
    ),
    "a routing rule for everybody": stands(ip("host", "rule add lookup 99", "rule delete lookup 99"), OPERATOR),
    "a route of the host to a granted address": stands(
        ip("host", "route add 93.184.216.34 via 10.77.0.1", "route del 93.184.216.34"), OPERATOR
    ),
    "a queue at the operator's interface": stands(
        tc("host", "qdisc add dev eth0 root pfifo", "qdisc del dev eth0 root"), OPERATOR
    ),
    "the host made a router": stands(
        setting("host", "ipv4/ip_forward", "1"), "As docker does; the table of runs drops what that lets pass for them"
    ),
    "the host answers for an address": stands(
        ip("host", "neigh add proxy 10.77.0.77 dev eth0", "neigh del proxy 10.77.0.77 dev eth0"), OPERATOR
    ),
}


def _one_processor(pid: int) -> None:
    os.sched_setaffinity(pid, {min(os.sched_getaffinity(pid))})


def _all_processors(pid: int) -> None:
    os.sched_setaffinity(pid, range(os.cpu_count() or 1))


def _written(name: str, value: str) -> Callable[[int], None]:
    def change(pid: int) -> None:
        Path(f"/proc/{pid}/{name}").write_text(value)

    return change


def _files(most: int) -> Callable[[int], None]:
    def change(pid: int) -> None:
        hard = resource.prlimit(pid, resource.RLIMIT_CORE)[1]
        resource.prlimit(pid, resource.RLIMIT_CORE, (min(most, hard) if hard >= 0 else most, hard))

    return change


def _poked(pid: int) -> None:
    """Write the first byte of a process's stack where it stands already."""
    line = next(line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "[stack]" in line)
    at = int(line.split("-")[1].split()[0], 16) - 4096
    fd = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        os.pwrite(fd, os.pread(fd, 1, at), at)
    finally:
        os.close(fd)


# A number that no process of a run uses.
_ASIDE: Final = 900


def _stdin_replaced(pid: int) -> None:
    """Put the agent's stdout in the place of its stdin: the sandbox has them under 256 and 257."""
    injected.call(pid, injected.DUP3, 256, _ASIDE, os.O_CLOEXEC)
    injected.call(pid, injected.DUP3, 257, 256, os.O_CLOEXEC)


def _stdin_put_back(pid: int) -> None:
    injected.call(pid, injected.DUP3, _ASIDE, 256, os.O_CLOEXEC)
    injected.call(pid, injected.CLOSE, _ASIDE)


def _nothing(pid: int) -> None:
    del pid


_BIND = libc.MS_BIND
PROCESSES: Final[dict[str, Change]] = {
    "pids.max raised": caught(limit("pids", "pids.max", "max"), "cgroup"),
    "the quota of the processor raised": caught(limit("cpu", "cpu.cfs_quota_us", "900000"), "cgroup"),
    "the period of the processor changed": caught(limit("cpu", "cpu.cfs_period_us", "50000"), "cgroup"),
    "a burst of the processor": caught(limit("cpu", "cpu.cfs_burst_us", "100000"), "cgroup"),
    "the weight of the processor raised": caught(limit("cpu", "cpu.shares", "4096"), "cgroup"),
    "swappiness raised": caught(limit("memory", "memory.swappiness", "60"), "cgroup"),
    "the out-of-memory killer switched off": caught(limit("memory", "memory.oom_control", "1"), "cgroup"),
    "pids.max of the gates raised": caught(limit("pids", "pids.max", "99", gates=True), "cgroup"),
    "a burst of the gates": caught(limit("cpu", "cpu.cfs_burst_us", "50000", gates=True), "cgroup"),
    "pids.max lowered": caught(limit("pids", "pids.max", "150"), "cgroup"),
    "the quota of the processor lowered": stands(limit("cpu", "cpu.cfs_quota_us", "50000"), LESS),
    "the weight of the processor lowered": stands(limit("cpu", "cpu.shares", "512"), LESS),
    "a soft limit of memory": stands(limit("memory", "memory.soft_limit_in_bytes", "50000000"), LESS),
    "the sandbox frozen": stands(
        limit("freezer", "freezer.state", "FROZEN"), "It does nothing meanwhile, and its limits are as they were"
    ),
    "the quota raised (version 2)": caught(limit("cpu", "cpu.max", "900000 100000"), "cgroup"),
    "a burst of the processor (version 2)": caught(limit("cpu", "cpu.max.burst", "100000"), "cgroup"),
    "the weight of the processor raised (version 2)": caught(limit("cpu", "cpu.weight", "400"), "cgroup"),
    "memory protected from the host (version 2)": caught(limit("memory", "memory.low", "1048576"), "cgroup"),
    "the sandbox moved out of a cgroup": caught(moved("memory"), "cgroup"),
    "the sandbox moved to a cgroup below": caught(moved("pids", below=True), "cgroup"),
    "one thread moved out of a cgroup": caught(moved("cpu", thread=True), "cgroup"),
    "a gate moved out of its cgroup": caught(moved("pids", gates=True), "cgroup"),
    "a stranger in the run's cgroup": caught(stranger(controller="pids"), "cgroup"),
    "a stranger in the gates' cgroup": stands(
        stranger(controller="pids", gates=True), "It has less than before, and takes from the gates' share"
    ),
    "a stranger in the gateway": caught(stranger(space_of="gateway"), "namespace"),
    "a stranger beside the agent": caught(stranger(space_of="agent"), "namespace"),
    "the sandbox on one processor": stands(
        process("sandbox", _one_processor, _all_processors), "Which processor it is, is no grant"
    ),
    "oom_score_adj of the sandbox": stands(
        process("sandbox", _written("oom_score_adj", "500"), _written("oom_score_adj", "0")),
        "Who is killed first where the host has no memory left is no grant",
    ),
    "a limit of the gofer lowered by prlimit": stands(
        process("gofer", _files(0), _nothing),
        "gVisor holds the agent's limits itself; those of its own processes bound nothing of it",
    ),
    "the gofer stopped": stands(process("gofer", stopped, gone_on), LESS),
    "a gate stopped": stands(process("gate", stopped, gone_on), "Nothing passes it meanwhile"),
    "another file in the place of the agent's stdin": caught(
        process("sandbox", _stdin_replaced, _stdin_put_back), "streams"
    ),
    "memory of the sandbox written": stands(process("sandbox", _poked, _nothing), MEMORY),
    "memory of a gate written": stands(process("gate", _poked, _nothing), MEMORY),
}

# Files that only one version of cgroups has: a machine tries those of its own version.
OF_VERSION: Final[dict[int, frozenset[str]]] = {
    1: frozenset(
        name
        for name in PROCESSES
        if (
            not name.endswith("(version 2)")
            and name.startswith(
                ("the quota", "the period", "the weight", "swappiness", "the out-of-memory", "a soft limit")
            )
        )
        or name in ("a burst of the processor", "a burst of the gates", "one thread moved out of a cgroup")
        or name == "the sandbox frozen"
    ),
    2: frozenset(name for name in PROCESSES if name.endswith("(version 2)")),
}

FILES: Final[dict[str, Change]] = {
    "a mount in the agent's root": caught(
        in_mounts("gofer", "libc.mount('tmpfs', '/usr', 'tmpfs')", "libc.umount2('/usr', libc.MNT_DETACH)"), "mounts"
    ),
    "a mount over the package": caught(
        in_mounts(
            "gofer", f"libc.mount('/usr', '/workspace', flags={_BIND})", "libc.umount2('/workspace', libc.MNT_DETACH)"
        ),
        "mounts",
    ),
    "a file of the package changed": caught(file_of_run("{package}/main.py", lambda text: text + b"#\n"), "package"),
    "a file added to the package": caught(file_of_run("{package}/more.py", lambda text: b"#\n"), "package"),
    "the configuration of runsc changed": caught(
        file_of_run("{run}/bundle/config.json", lambda text: text + b" "), "bundle"
    ),
    "a file added to the root image": stands(
        file_of_run("{state}/rootfs/hand", lambda text: b"#\n"),
        "Root images are checked when they are made, and each is read-only for the agent",
    ),
    "the record of the last runsc changed": stands(
        file_of_run("{state}/closures/binary.json", lambda text: b"{}"),
        "The digest is of the file that runs, and is taken anew for another file",
    ),
    "the record for other attestors removed": stands(
        file_of_run("{run}/attest.json", lambda text: b""),
        "A run attests itself from what it has in memory; another attestor then reads none",
    ),
}
