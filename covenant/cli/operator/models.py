"""``covenant models``: the operator's providers, whether they answer, and how much each agent asked of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    from sandbox.network.service.probe import ProviderStatus

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_ID_BEGINS = 8
_COUNTED = ("requests", "input_tokens", "output_tokens", "credits")
_COUNTED_WEB = ("requests", "results", "bytes", "credits")
_COUNTED_TELEMETRY = ("requests", "records", "rejected", "bytes")


@click.group()
def models() -> None:
    """See the providers of models, and what agents asked of them."""


@models.command("list", epilog=common.examples("covenant models list"))
@_JSON
def list_(as_json: bool) -> None:
    """List the providers of providers.toml, in the order in which they are asked."""
    from sandbox.network.service import providers

    found = [
        {
            "name": name,
            "kind": one.kind,
            "endpoint": "" if one.kind == "mock" else one.url,
            "secret": one.secret,
            "input_price": one.input_price,
            "output_price": one.output_price,
        }
        for name, one in providers.load(common.state()).items()
    ]
    if as_json:
        common.say(json.dumps({"kind": "models", "providers": found}))
        return
    for row in found:
        key = f"  key {row['secret']}" if row["secret"] else ""
        common.say(common.visible(f"{row['name']}  {row['kind']}  {row['endpoint']}{key}".rstrip()))
    if not found:
        common.say(f"no provider: write {common.state()}/providers.toml (docs/models.md)")


@models.command(epilog=common.examples("covenant models test local"))
@click.argument("provider")
@_JSON
def test(provider: str, as_json: bool) -> int:
    """Ask PROVIDER for its list of models with the operator's key. Exit status 3: it does not give one."""
    from policy.manifest.services import PROVIDERS_ID
    from sandbox import config as configuration
    from sandbox.lifecycle import model_terms
    from sandbox.network.service import probe, providers
    from sandbox.vault.open import configured

    config = configuration.load(common.state())
    known = providers.load(config.state)
    if provider not in known:
        table = f"write [providers.NAME] in {common.state()}/providers.toml"
        raise errors.UsageError(
            f"provider `{common.visible(provider)}` is not in providers.toml",
            hint=f"known: {', '.join(known)}" if known else table,
        )
    one, key = known[provider], ""
    if one.secret:
        with configured(config).opened(PROVIDERS_ID, one.secret) as opened:
            if opened is None:
                raise errors.VaultError(
                    f"the key of provider `{provider}` is not in the vault",
                    hint=f"covenant vault put {PROVIDERS_ID} {one.secret}",
                )
            key = str(opened.value.view, "utf-8").strip()
    answer: ProviderStatus = probe.ask(one, key, config.tls.further(), model_terms.proxy(config))
    if as_json:
        common.say(json.dumps({"kind": "model_test", "provider": provider, **structs.asdict(answer)}))
    else:
        common.say(common.visible(f"{provider}: {answer.says}"))
    return common.EXIT_DONE if answer.works else common.EXIT_NO


@models.command(epilog=common.examples("covenant models usage", "covenant models usage librarian"))
@click.argument("subject", metavar="[AGENT|RUN]", required=False)
@_JSON
def usage(subject: str | None, as_json: bool) -> None:
    """Sum the requests to models, searches, pages and telemetry of each agent, or of AGENT or of RUN.

    RUN is the id of a run, or at least 8 letters that it begins with. The source is the supervisor's log; without root
    it is the daemon's copies, which are of the runs of its intents.
    """
    asked = _sums("model_asked", ("agent_id", "provider", "model"), _COUNTED, subject)
    web = _sums("web_asked", ("agent_id", "service", "target"), _COUNTED_WEB, subject)
    telemetry = _sums("telemetry_relayed", ("agent_id", "signal"), _COUNTED_TELEMETRY, subject)
    if as_json:
        common.say(json.dumps({"kind": "model_usage", "usage": asked, "web": web, "telemetry": telemetry}))
        return
    for row in asked:
        counts = f"{row['requests']} requests, {row['input_tokens']} tokens in, {row['output_tokens']} out"
        common.say(
            common.visible(f"{row['agent_id']}  {row['provider']}/{row['model']}  {counts}, {row['credits']} credits")
        )
    for row in web:
        what = f"{row['results']} results" if row["service"] == "search" else f"{row['bytes']} bytes"
        counts = f"{row['requests']} requests, {what}, {row['credits']} credits"
        common.say(common.visible(f"{row['agent_id']}  {row['service']} {row['target']}  {counts}"))
    for row in telemetry:
        counts = f"{row['requests']} requests, {row['records']} records, {row['rejected']} rejected"
        common.say(common.visible(f"{row['agent_id']}  telemetry {row['signal']}  {counts}, {row['bytes']} bytes"))
    if not asked and not web and not telemetry:
        of = "" if subject is None else f" of `{common.visible(subject)}`"
        common.say(f"no request{of} to a model, search, page or collector is in the log")


@models.command("import", epilog=common.examples("covenant models import > providers.toml"))
@_JSON
def import_(as_json: bool) -> None:
    """Print [llm] and [search] of the home's secrets.toml, as version 1 reads them, as tables of providers.toml.

    Their keys are not printed: the lines at the end say how each is put into the vault.
    """
    from covenant import homes, imported_providers
    from policy.manifest.services import PROVIDERS_ID

    found = imported_providers.imported(homes.home())
    puts = [f"covenant vault put {PROVIDERS_ID} {secret}" for secret in found.secrets]
    if as_json:
        document = {"kind": "imported", "providers": found.text, "manifest": found.manifest, "commands": puts}
        common.say(json.dumps(document))
        return
    common.say(found.text.rstrip())
    for line in (*puts, "in agent.toml:", *found.manifest.splitlines()):
        common.say(f"# {line}".rstrip())


def _sums(kind: str, keys: tuple[str, ...], counted: tuple[str, ...], subject: str | None) -> list[dict[str, Any]]:
    """Sum the rows of one kind by ``keys``. The first of ``counted`` is their number."""
    totals: dict[tuple[str, ...], dict[str, int]] = {}
    for row in _rows(kind, counted[1:]):
        if subject is not None and not _is_about(row, subject):
            continue
        total = totals.setdefault(tuple(str(row[key]) for key in keys), dict.fromkeys(counted, 0))
        total[counted[0]] += 1
        for name in counted[1:]:
            total[name] += row[name]
    return [{**dict(zip(keys, key, strict=True)), **total} for key, total in sorted(totals.items())]


def _is_about(row: dict[str, Any], subject: str) -> bool:
    """Whether a row is of this agent, or of the run whose id begins so: an id is short in lists of runs."""
    begins = len(subject) >= _ID_BEGINS and str(row["run_id"]).startswith(subject)
    return begins or row["agent_id"] == subject


def _rows(kind: str, counted: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of one kind in the supervisor's log or the daemon's copies, oldest first."""
    from covenant.cli.audit import read_logs

    rows = read_logs.supervisor_events(kind.encode())
    return [row for row in rows if row.get("type") == kind and all(type(row.get(name)) is int for name in counted)]
