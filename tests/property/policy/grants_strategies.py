"""Hypothesis strategies for every domain of grants: small alphabets, so that values overlap, nest and collide."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec import structs

from policy.grants import skill_rules
from policy.grants.credentials import CredentialSet, InjectRule, InjectSet
from policy.grants.effective import DOMAINS, Effective
from policy.grants.executables import ExecutableSet
from policy.grants.identity import Identity
from policy.grants.lifetime import ON_EXPIRY, LifetimeGrant
from policy.grants.network import MODES as NETWORK_MODES
from policy.grants.network import Network
from policy.grants.paths import MODES as FILESYSTEM_MODES
from policy.grants.paths import FilesystemGrants, PathSet
from policy.grants.resources import UNITS, Ceilings
from policy.grants.services import SIGNALS, AgentSet, HostPorts, PublishSet, ServiceSet, SshSet, TelemetrySet, WebSet
from policy.grants.sets.access import PROTOCOLS
from policy.grants.sets.domain import NameSet
from policy.grants.skill_rules import ToolCondition
from policy.grants.skills import SIDE_EFFECTS, SkillSet
from policy.grants.spawning import ON_PARENT_EXIT, MayGrant, Spawning
from policy.grants.syscalls import SyscallSet

# `data` beside `data2` and `data-x`: by string one is a prefix of the others, by component none is.
components = st.sampled_from(["data", "data2", "data-x", "a", "b", "é"])
paths = st.lists(components, max_size=4).map(lambda parts: "/" + "/".join(parts))
path_lists = st.lists(paths, max_size=5)
path_sets = path_lists.map(PathSet.of)

names = st.lists(st.sampled_from(["a", "b", "com", "ex"]), min_size=1, max_size=4).map(".".join)
addresses = st.sampled_from([
    "10.0.0.0/8", "10.1.0.0/16", "10.0.0.0/9", "10.128.0.0/9", "10.1.2.3", "8.8.8.8", "8.8.8.0/24", "8.0.0.0/5",
    "127.0.0.1", "169.254.169.254", "2001:db8::/32", "2606:4700::/32", "2606:4700::1111", "::ffff:10.1.2.3", "fe80::1",
])  # fmt: skip
hosts = st.one_of(names, names.map(lambda n: f"*.{n}"), addresses)
ports = st.tuples(st.integers(1, 12), st.integers(0, 6)).map(lambda p: (p[0], p[0] + p[1]))
port_lists = st.lists(ports | st.just((443, 443)), min_size=1, max_size=3)
entries = st.tuples(hosts, port_lists, st.sampled_from(PROTOCOLS))

asked_entries = st.tuples(st.one_of(names, names.map(lambda n: f"*.{n}")), port_lists, st.just("tls"))

networks = st.one_of(
    st.lists(entries, max_size=6).map(Network.of),
    st.builds(Network.of, st.lists(entries, max_size=3), st.lists(asked_entries, max_size=3)),
    st.sampled_from(NETWORK_MODES).map(Network.without_table),
    st.just(Network.top()),
)
modes = st.sampled_from(FILESYSTEM_MODES)
volumes = st.lists(st.sampled_from(["data:/data", "data:/mnt", "cache:/data"]), max_size=3)
filesystems = st.builds(
    FilesystemGrants.of, modes, path_lists, path_lists, shared=st.booleans(), volumes=volumes
) | st.just(FilesystemGrants.top())

calls = st.frozensets(st.sampled_from(["read", "write", "execve", "execveat", "memfd_create", "openat"]))
syscalls = calls.map(SyscallSet) | st.just(SyscallSet.top())

digests = st.sampled_from([None, "a1" * 32, "b2" * 32])
trees = st.sets(st.sampled_from(["root", "layer:tools", "layer:node"]), max_size=3)
executables = st.builds(ExecutableSet.of, st.lists(st.tuples(paths, digests), max_size=5), trees) | st.just(
    ExecutableSet.top()
)

ceilings = st.none() | st.integers(0, 3)
resources = st.tuples(*(ceilings for _ in UNITS)).map(lambda values: Ceilings(*values))

words = st.frozensets(st.sampled_from(["a", "b", "c"]))
credentials = words.map(CredentialSet) | st.just(CredentialSet.top())
rule_rows = st.tuples(
    st.sampled_from(["a", "b"]),
    st.sampled_from(["path", "mode"]),
    st.lists(
        st.sampled_from([
            ToolCondition("equals", '"x"'), ToolCondition("equals", '"xy"'), ToolCondition("equals", "1"),
            ToolCondition("equals", "true"), ToolCondition("matches", "x.*"), ToolCondition("matches", "x|1"),
        ]),
        max_size=3,
    ),
)  # fmt: skip
tool_rules = st.lists(rule_rows, max_size=4).map(skill_rules.of)
skills = st.builds(
    lambda allow, effects, rules, limits, asked: structs.replace(
        SkillSet(allow, effects, rules, *limits), asked=tuple(asked)
    ),
    words.map(NameSet.of) | st.just(NameSet.top()),
    st.frozensets(st.sampled_from(SIDE_EFFECTS)).map(NameSet.of),
    tool_rules,
    st.tuples(*[st.sampled_from([None, 0, 1, 60])] * 4),
    words,
) | st.just(SkillSet.top())
spawnings = st.builds(Spawning, ceilings, ceilings, st.sampled_from(ON_PARENT_EXIT))
lifetimes = st.builds(LifetimeGrant, ceilings, st.sampled_from(ON_EXPIRY))

patterns = st.sampled_from(["*", "a*", "ab*", "abc", "ab", "b", "b*"])
models = st.lists(st.tuples(st.sampled_from(["p", "q"]), patterns), max_size=4)
services = st.builds(ServiceSet.of, models, ceilings, ceilings, ceilings) | st.just(ServiceSet.top())

places = st.sampled_from(["unix:/a", "unix:/b", "127.0.0.1:2000"])
published = st.builds(PublishSet.ports, st.lists(st.tuples(st.sampled_from([80, 8080]), places), max_size=3))
published = published | st.just(PublishSet.top())

hosted = st.builds(HostPorts.ports, st.frozensets(st.sampled_from([1024, 5432, 11434]))) | st.just(HostPorts.top())

ssh_rows = st.tuples(
    st.sampled_from(["s", "t"]),
    st.sampled_from(["git.example.org", "10.0.0.1"]),
    st.sampled_from(["ssh-ed25519 AAAA", "ssh-rsa AAAA=="]),
)
signing = st.builds(SshSet.rows, st.lists(ssh_rows, max_size=3)) | st.just(SshSet.top())

request_paths = st.sampled_from(["/*", "/a*", "/a/*", "/a/b", "/b"])
inject_rules = st.builds(
    InjectRule,
    st.sampled_from(["a.example", "b.example"]),
    st.sampled_from(["s", "t"]),
    st.just("Authorization"),
    st.sampled_from(["{}", "Bearer {}"]),
    st.just(""),
    st.sampled_from(["GET", "POST", "*"]),
    request_paths,
)
injected = st.builds(InjectSet.of, st.lists(inject_rules, max_size=4), st.lists(inject_rules, max_size=2)) | st.just(
    InjectSet.top()
)
searchers = st.lists(st.sampled_from(["p", "q", "r"]), max_size=3)
page_hosts = st.lists(
    st.sampled_from(["a.example.com", "*.example.com", "*.a.example.com", "b.test", "*.test"]), max_size=4
)
webs = st.builds(WebSet.of, searchers, page_hosts, ceilings, ceilings, ceilings) | st.just(WebSet.top())

rights = st.builds(MayGrant, networks, path_sets, credentials, syscalls) | st.just(MayGrant.top())

# A small order of roles: low is below left and right, which are below high.
BELOW = {
    "low": frozenset({"low"}),
    "left": frozenset({"left", "low"}),
    "right": frozenset({"right", "low"}),
    "high": frozenset({"high", "left", "right", "low"}),
}
identities = st.sampled_from([None, "unknown", *BELOW]).map(lambda role: Identity.of(role, BELOW))

BY_DOMAIN = {
    "identity": identities,
    "filesystem": filesystems,
    "network": networks,
    "syscalls": syscalls,
    "executables": executables,
    "resources": resources,
    "credentials": credentials,
    "skills": skills,
    "spawning": spawnings,
    "lifetime": lifetimes,
    "services": services,
    "publish": published,
    "inject": injected,
    "web": webs,
    "host_ports": hosted,
    "ssh": signing,
    "may_grant": rights,
    "agents": st.builds(AgentSet.of, st.frozensets(st.sampled_from(["a", "b", "c"]))) | st.just(AgentSet.top()),
    "telemetry": st.builds(
        TelemetrySet.of,
        st.frozensets(st.sampled_from(SIGNALS)),
        st.none() | st.integers(1, 5),
        st.none() | st.integers(1, 5),
    )
    | st.just(TelemetrySet.top()),
}
assert tuple(BY_DOMAIN) == tuple(DOMAINS)
effectives = st.builds(Effective, **BY_DOMAIN)
