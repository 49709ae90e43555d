"""OpenBao as a vault: secrets in a KV version 2 store. Only the supervisor sends requests to it, never an agent.

    <mount>/data/<prefix>/<agent id>/<name>     {"value": "..."}

The token needs create, read, update, delete and list below <mount>/data/<prefix> and <mount>/metadata/<prefix>; a
supervisor that only reads secrets needs read of the former. The server decides which secret is at a path: a client
with write access there may exchange one for another.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from policy import errors
from sandbox.config import VaultSettings
from sandbox.kernel.proc.secret_memory import Locked
from sandbox.vault import backend, keys
from sandbox.vault.backend import Before, Change, OpenedSecret, SecretEntry

if TYPE_CHECKING:
    import hvac

_T = TypeVar("_T")
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z")


class OpenBao:
    """The store that ``settings`` names. Only a connection is kept between two calls.

    Raises:
        errors.VaultError: Raised when hvac is not installed, or no token is configured.
    """

    name = "openbao"

    def __init__(self, settings: VaultSettings) -> None:
        if settings.token is None:
            raise errors.VaultKeyError("no token is configured for OpenBao", hint='write [vault] token = "FILE"')
        self._settings, self._token = settings, settings.token
        self._kv = self._client().secrets.kv.v2

    def entries(self, agent_id: str | None = None) -> list[SecretEntry]:
        """Implement ``Backend.entries``."""
        agents = [agent_id] if agent_id is not None else [one.rstrip("/") for one in self._listed("")]
        found = [self._entry(agent, name) for agent in agents for name in self._listed(agent)]
        return sorted((one for one in found if one is not None), key=lambda one: (one.agent_id, one.name))

    def put(self, agent_id: str, name: str, value: memoryview, *, before: Before) -> SecretEntry:
        """Implement ``Backend.put``."""
        backend.check_place(agent_id, name)
        backend.check_value(value)
        if self._entry(agent_id, name) is not None:
            raise backend.taken(agent_id, name)
        before(Change("put", agent_id, name, 1))
        self._write(agent_id, name, value, expected=0)
        return self._there(agent_id, name)

    def rotate(self, agent_id: str, name: str, value: memoryview, *, before: Before) -> SecretEntry:
        """Implement ``Backend.rotate``."""
        backend.check_place(agent_id, name)
        backend.check_value(value)
        last = self._there(agent_id, name)
        before(Change("rotated", agent_id, name, last.version + 1))
        self._write(agent_id, name, value, expected=last.version)
        return self._there(agent_id, name)

    def remove(self, agent_id: str, name: str, *, before: Before) -> SecretEntry:
        """Implement ``Backend.remove``."""
        backend.check_place(agent_id, name)
        last = self._there(agent_id, name)
        before(Change("removed", agent_id, name, last.version))
        path = self._path(agent_id, name)
        self._asked(lambda: self._kv.delete_metadata_and_all_versions(path=path, mount_point=self._settings.mount))
        return last

    @contextlib.contextmanager
    def opened(self, agent_id: str, name: str) -> Iterator[OpenedSecret | None]:
        """Implement ``Backend.opened``. A name that no secret can have gets the same request as a missing one."""
        path = self._path(agent_id, name if backend.is_name(name) else "-")
        found = self._asked(
            lambda: self._kv.read_secret_version(
                path=path, mount_point=self._settings.mount, raise_on_deleted_version=True
            )
        )
        if found is None or not backend.is_name(name):
            yield None
            return
        raw, version = _secret(found)
        with Locked(len(raw)) as value:
            value.view[:] = raw
            del raw, found
            yield OpenedSecret(version, value)

    # --- the server -------------------------------------------------------------------------------

    def _client(self) -> hvac.Client:
        try:
            import hvac
            import requests
        except ImportError:
            raise errors.VaultError("OpenBao needs the package `hvac`", hint='pip install "hvac>=2.3"') from None
        session = requests.Session()
        # No proxy, no certificates and no passwords by the environment.
        session.trust_env = False
        settings = self._settings
        # hvac leaves a session that it is given as it is.
        session.verify = str(settings.ca) if settings.ca else True
        with keys.private_file(self._token, least_bytes=1) as token:
            return hvac.Client(
                url=settings.address.rstrip("/"),
                token=bytes(token.view).decode("ascii", "replace").strip(),
                timeout=settings.timeout_seconds,
                allow_redirects=False,
                session=session,
            )

    def _asked(self, ask: Callable[[], _T]) -> _T | None:
        """Send a request and return the server's answer. None for a path without a secret.

        Raises:
            errors.SecretError: Raised when another write came first.
            errors.VaultError: Raised when the server does not answer, or refuses. INVARIANT: it never contains the
                server's text, which may quote a secret.
        """
        import requests
        from hvac import exceptions

        address = self._settings.address
        try:
            return ask()
        except exceptions.InvalidPath:
            return None
        except exceptions.Forbidden:
            raise errors.VaultKeyError("OpenBao does not take the token", where=address) from None
        except exceptions.InvalidRequest as e:
            if "check-and-set" in str(e):
                raise errors.SecretError("the secret was written by somebody else in between") from None
            raise errors.VaultError("OpenBao refuses the request", where=address) from None
        except exceptions.VaultDown:
            hint = "`bao status` says which; `bao operator unseal` after each start of it"
            raise errors.VaultError("OpenBao is sealed, or has no leader just now", hint=hint, where=address) from None
        except exceptions.VaultError as e:
            raise errors.VaultError(f"OpenBao cannot answer: {type(e).__name__}", where=address) from None
        except requests.RequestException as e:
            raise errors.VaultError(f"OpenBao does not answer: {type(e).__name__}", where=address) from None

    def _path(self, agent_id: str, name: str = "") -> str:
        return "/".join(part for part in (self._settings.prefix, agent_id, name) if part)

    def _listed(self, agent_id: str) -> list[str]:
        path = self._path(agent_id)
        found = self._asked(lambda: self._kv.list_secrets(path=path, mount_point=self._settings.mount))
        listed = [] if found is None else found["data"]["keys"]
        return [one for one in listed if isinstance(one, str) and one.endswith("/") == (not agent_id)]

    def _write(self, agent_id: str, name: str, value: memoryview, *, expected: int) -> None:
        path, secret = self._path(agent_id, name), {"value": str(value, "utf-8")}
        done = self._asked(
            lambda: self._kv.create_or_update_secret(
                path=path, secret=secret, cas=expected, mount_point=self._settings.mount
            )
        )
        if done is None:
            raise errors.VaultError("OpenBao has no such KV version 2 store", where=self._settings.address)

    def _entry(self, agent_id: str, name: str) -> SecretEntry | None:
        path = self._path(agent_id, name)
        found = self._asked(lambda: self._kv.read_secret_metadata(path=path, mount_point=self._settings.mount))
        if found is None:
            return None
        about = found["data"]
        version = about["current_version"]
        last = about["versions"].get(str(version))
        if last is None or last["deletion_time"] or last["destroyed"]:
            return None
        return SecretEntry(
            agent_id, name, version, _milliseconds(about["created_time"]), _milliseconds(last["created_time"])
        )

    def _there(self, agent_id: str, name: str) -> SecretEntry:
        found = self._entry(agent_id, name)
        if found is None:
            raise backend.missing(agent_id, name)
        return found


def _secret(found: dict[str, Any]) -> tuple[bytes, int]:
    value, version = found["data"]["data"].get("value"), found["data"]["metadata"]["version"]
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else b""
    if not 0 < len(raw) <= backend.MAX_VALUE_BYTES or b"\0" in raw:
        raise errors.VaultError("what OpenBao has there is no secret: a text at the key `value` is wanted")
    return raw, int(version)


def _milliseconds(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        return 0
    at = datetime.datetime.fromisoformat(match[1]).replace(tzinfo=datetime.UTC)
    return int(at.timestamp() * 1000 + float(match[2] or 0) * 1000)
