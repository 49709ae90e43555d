"""Questions about logins that the ssh-agent service signs."""

from __future__ import annotations

from msgspec import Struct
from pydantic_core import PydanticCustomError

from policy import errors
from policy.decompile.read import Grants
from policy.grants.effective import Effective
from policy.manifest import services, text
from policy.why.ask import LayerAnswer, Sight


class SignLogin(Struct, frozen=True):
    """Log in at a host by a key of the vault. The keys of the host decide; the name is the manifest's."""

    host: str

    def __post_init__(self) -> None:
        try:
            services.ssh_host(self.host)
        except PydanticCustomError as e:
            raise errors.UsageError(e.message(), hint="name one host, as in git.example.org") from None

    def describe(self) -> str:
        """The host."""
        return f"sign logins at {text.visible(self.host)}"

    def seen(self, sight: Sight) -> LayerAnswer:
        """By the keys of the gate that signs."""
        held = [row for row in sight.found.grants.ssh.triples() if row[1] == self.host]
        if held:
            secrets = " and ".join(sorted({secret for secret, _, _ in held}))
            return LayerAnswer(
                True, f"a gate signs them by the secret {secrets}", f"gates.json:ssh/{'/'.join(held[0])}"
            )
        if not self.granted(sight.found.grants):
            words = "no key is granted at this host: [[services.ssh_agent]] names it, with its keys of ssh-keyscan"
            return LayerAnswer(False, words, "gates.json:ssh")
        return LayerAnswer(True, "a gate signs logins at any host", "gates.json:ssh")

    def granted(self, grants: Grants | Effective) -> bool:
        """By the keys of SSH."""
        return grants.ssh.any or any(host == self.host for _, host, _ in grants.ssh.triples())

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """Return nothing: only the owner of the host knows its keys."""
        return ()

    def never(self, sight: Sight) -> str:
        """Every host can be granted by some key."""
        return ""
