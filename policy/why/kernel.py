"""Questions to the gateway, the filter and the vault: may the agent connect, make this call, use this secret?"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct
from pydantic_core import PydanticCustomError

from policy import data, errors
from policy.decompile import conditions
from policy.decompile.read import Grants
from policy.grants.effective import Effective
from policy.grants.sets import addresses
from policy.grants.sets.access import PROTOCOLS, Access
from policy.grants.sets.access import Protocol as Transport
from policy.manifest import hosts, text
from policy.manifest.permissions import HOST_NAME, HOST_PORT_TAKEN, HOST_PORTS_FROM
from policy.why.ask import LayerAnswer, Sight, toml


class Connect(Struct, frozen=True):
    """Open a connection to a name or an address; ``protocol`` None asks for any of the three."""

    host: str
    port: int
    protocol: Transport | None = None

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise errors.UsageError(f"port `{self.port}` is not between 1 and 65535")

    def describe(self) -> str:
        """The destination."""
        host = f"[{self.host}]" if ":" in self.host else text.visible(self.host)
        return f"connect {host}:{self.port}" + (f" by {self.protocol}" if self.protocol else "")

    def _access(self, grants: Grants | Effective) -> Access:
        if self.host == HOST_NAME:
            ports = grants.host_ports
            return Access.of("tcp", [(1, 65535)] if ports.any else [(port, port) for port in ports.numbers()])
        try:
            is_address = addresses.parse(self.host) is not None
            return grants.network.to_address(self.host) if is_address else grants.network.to_name(self.host)
        except errors.ManifestError as e:
            raise errors.UsageError(e.message, hint="name one host, as in example.org:443") from None

    def _allowed(self, grants: Grants | Effective) -> list[Transport]:
        access = self._access(grants)
        asked = (self.protocol,) if self.protocol else PROTOCOLS
        return [one for one in asked if access.allows(one, self.port)]

    def seen(self, sight: Sight) -> LayerAnswer:
        """By the rules of the gateway, as they were read back."""
        found = self._allowed(sight.found.grants)
        if found:
            if self.host == HOST_NAME:
                return LayerAnswer(True, "a gate carries it to this host's loopback", f"gates.json:host/{self.port}")
            return LayerAnswer(True, f"the gateway lets it pass by {' and '.join(found)}", "firewall.nft")
        if self._leased(sight.found.grants):
            words = "an operator is asked about it, and grants it by a lease: covenant approvals list"
            return LayerAnswer(False, words, "gates.json:dns/asked")
        if sight.found.reached.mode == "off":
            return LayerAnswer(False, "there is no interface but loopback", "network.json:mode")
        return LayerAnswer(False, "no rule of the gateway lets it pass", "firewall.nft")

    def _leased(self, grants: Grants | Effective) -> bool:
        if addresses.parse(self.host) is not None:
            return False
        held, wanted = grants.network.to_asked(self.host), (self.protocol,) if self.protocol else PROTOCOLS
        return any(held.allows(one, self.port) for one in wanted)

    def granted(self, grants: Grants | Effective) -> bool:
        """By the network domain."""
        return bool(self._allowed(grants))

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """An entry, and the mode that it needs."""
        if self.host == HOST_NAME:
            return ("[[permissions.network]]", f'host = "{HOST_NAME}"', f"ports = [{self.port}]", 'protocol = "tcp"')
        protocol = self.protocol or ("tls" if self.port == 443 else "tcp")
        narrow = protocol == "tls" and self.port == 443 and sight.found.reached.mode != "full"
        mode = "outbound-https-only" if narrow else "full"
        change = () if sight.found.reached.mode == mode else ("[resources]", f'network = "{mode}"')
        entry = (f"host = {toml(self._written())}", f"ports = [{self.port}]", f'protocol = "{protocol}"')
        return (*change, "[[permissions.network]]", *entry)

    def never(self, sight: Sight) -> str:
        """Return the names that no entry can hold: no single destination, a name of this machine, a bare label."""
        if self.host == HOST_NAME:
            granted = self.port >= HOST_PORTS_FROM and self.port != HOST_PORT_TAKEN and self.protocol in (None, "tcp")
            return "" if granted else f"{HOST_NAME} has ports from {HOST_PORTS_FROM} by tcp, but for {HOST_PORT_TAKEN}"
        try:
            hosts.check(self._written())
        except PydanticCustomError as e:
            # Without a table every name is resolved, also one that no entry could hold.
            return "" if self._allowed(sight.found.grants) else e.message()
        return ""

    def _written(self) -> str:
        """The host as a manifest spells it: IPv4 written as IPv6 is IPv4, since packets carry that form."""
        found = addresses.parse(self.host)
        return self.host if found is None else str(next(addresses.blocks(*found)).network_address)


@dataclass(frozen=True, slots=True)
class Call:
    """Make a system call, with any arguments."""

    name: str

    def describe(self) -> str:
        """The call."""
        return f"call {text.visible(self.name)}"

    def seen(self, sight: Sight) -> LayerAnswer:
        """By the filter, of which both forms were read back."""
        self._known()
        calls, rule = sight.found.calls, f"seccomp.bpf:{self.name}"
        if self.name in calls.missing:
            return LayerAnswer(False, "the filter answers ENOSYS, so that a libc takes an older call", rule)
        condition = calls.condition(self.name)
        if condition == conditions.NEVER:
            return LayerAnswer(
                False, "the filter answers EPERM, as to every call that is not granted", "seccomp.bpf:default"
            )
        if condition == conditions.ALWAYS:
            return LayerAnswer(True, "the filter allows it", rule)
        said = " or ".join(dict.fromkeys(_cube(cube) for cube in condition))
        return LayerAnswer(True, f"the filter allows it where {said}", rule)

    def _known(self) -> None:
        known = data.syscall_names()
        if self.name not in known:
            near = text.nearest(self.name, tuple(sorted(known)))
            hint = f"did you mean `{near}`?" if near else "names are those of the kernel's tables"
            raise errors.UnknownSyscallError(f"system call {text.quote(self.name)} is not known", hint=hint)

    def granted(self, grants: Grants | Effective) -> bool:
        """By the system call domain."""
        return grants.syscalls.holds(self.name)

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """The list of calls; a program's grant for the call that starts one."""
        if self.name == "execve":
            return "[permissions.executables]", 'allow = ["/usr/bin/PROGRAM"]'
        return "[permissions.syscalls]", f'allow = ["{self.name}"]'

    def never(self, sight: Sight) -> str:
        """The permanent deny list."""
        return data.deny().reasons.get(self.name, "")


class Credential(Struct, frozen=True):
    """Get a secret of the vault by its name."""

    name: str

    def describe(self) -> str:
        """The name."""
        return f"use credential {text.visible(self.name)}"

    def seen(self, sight: Sight) -> LayerAnswer:
        """By what the token of a run covers."""
        held = sight.found.grants.credentials.holds(self.name)
        because = "the run's vault token covers it" if held else "the run's vault token does not cover it"
        return LayerAnswer(held, because, f"credentials.json:{self.name}" if held else "credentials.json")

    def granted(self, grants: Grants | Effective) -> bool:
        """By the credentials domain."""
        return grants.credentials.holds(self.name)

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """The list of secrets."""
        return "[permissions.credentials]", f"grants = [{toml(self.name)}]"

    def never(self, sight: Sight) -> str:
        """Every secret can be granted by some key."""
        return ""


def _cube(cube: conditions.Cube) -> str:
    """``argument 1 & 0xffffffff is 0x5401``, joined by and."""
    mask, value = cube
    parts = []
    for argument in range(conditions.ARGUMENTS):
        shift, word = conditions.BITS * argument, (1 << conditions.BITS) - 1
        if own := mask >> shift & word:
            parts.append(f"argument {argument} & {own:#x} is {value >> shift & word:#x}")
    return " and ".join(parts)
