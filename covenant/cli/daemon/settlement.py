"""``covenant receipts``, ``settlement``, ``chain`` and ``budget``: what was used, and how it is settled."""

from __future__ import annotations

import click

from covenant.cli import common, terminal, times
from covenant.cli.daemon import client
from policy import errors

# What signs transactions of a chain in version 1. No key of a chain is in the daemon's reach here.
SIGNERS = (
    "register-agent",
    "stake",
    "buy-credits",
    "initialize",
    "open-credit-account",
    "unstake",
    "close-position",
    "migrate-config",
    "set-min-stake-lock",
    "set-credits-per-covnt",
    "update-authority",
    "update-slash-authority",
    "update-treasury",
)


@click.group()
def receipts() -> None:
    """See what was used, and by whom."""


@receipts.command(epilog=client.examples("covenant receipts recent -n 20"))
@client.limit(10)
@click.option("--since-ms", type=client.MILLISECONDS, help="From this Unix time on, in milliseconds.")
@client.as_json
def recent(limit: int, since_ms: int | None, as_json: bool) -> None:
    """Show the newest receipts."""
    response = client.ask("recent_receipts", limit=limit, since_ms=since_ms)
    if as_json:
        common.emit(client.envelope("receipt_list", response, limit=limit, since_ms=since_ms))
        return
    rows = [
        (
            times.utc(one["settled_at"]),
            one["resource"],
            one["credits_consumed"],
            one["payer"]["display"],
            "-" if one["batch_id"] is None else one["batch_id"][:16],
            one["id"],
        )
        for one in response["receipts"]
    ]
    terminal.print_table(("SETTLED", "RESOURCE", "CREDITS", "PAYER", "BATCH", "ID"), rows, nothing="no receipts")


@click.group()
def settlement() -> None:
    """Mend what settlement lacks."""


@settlement.command("backfill-receipts", epilog=client.examples("covenant settlement backfill-receipts --dry-run"))
@click.option("--dry-run", is_flag=True, help="Only say how many.")
@client.as_json
def backfill_receipts(dry_run: bool, as_json: bool) -> None:
    """Write receipts that records lack, and the records' ids into receipts that lack them."""
    with client.daemon() as daemon:
        response = daemon.ask("backfill_settlement_receipts", dry_run=dry_run)
    if as_json:
        body = {name: value for name, value in response.items() if name != "kind"}
        common.emit({"schema": "covenant.settlement.backfill.v1", **body})
        return
    common.say(f"{response['row_count']} receipts {'would be ' if dry_run else ''}mended")
    if response.get("rollback_path"):
        common.say(common.visible(f"as it was before: {response['rollback_path']}"), err=True)


@click.group()
def chain() -> None:
    """Settle receipts in batches. Nothing is on a chain unless it is configured."""


@chain.command(epilog=client.examples("covenant chain status"))
@client.as_json
def status(as_json: bool) -> None:
    """Show what is configured of a chain, and what is missing for it."""
    response = client.ask("chain_status")
    if as_json:
        common.emit(client.envelope("chain_status", response))
        return
    about = response["status"]
    common.say("ready" if about["ready"] else "off chain")
    for name, value in about.items():
        if name not in ("ready", "missing") and value is not None:
            common.say(common.visible(f"  {name}: {value}"))
    if about["missing"]:
        common.say(common.visible(f"  missing: {', '.join(about['missing'])}"))


@chain.command("flush-receipts", epilog=client.examples("covenant chain flush-receipts --limit 1000"))
@client.limit(100)
@client.as_json
def flush_receipts(limit: int, as_json: bool) -> None:
    """Put receipts that are in no batch into one, under its Merkle root."""
    with client.daemon() as daemon:
        response = daemon.ask("flush_receipts", limit=limit)
    if as_json:
        common.emit(client.envelope("receipt_batch_flushed", response, limit=limit))
        return
    batch = response["batch"]
    common.say(
        common.visible(f"batch {batch['batch_id']}: {batch['receipt_count']} receipts, root {batch['merkle_root']}")
    )


@chain.command("receipt-batches", epilog=client.examples("covenant chain receipt-batches"))
@client.limit(10)
@client.as_json
def receipt_batches(limit: int, as_json: bool) -> None:
    """Show the newest batches."""
    response = client.ask("receipt_batches", limit=limit)
    if as_json:
        common.emit(client.envelope("receipt_batch_list", response, limit=limit))
        return
    rows = [
        (one["batch_id"], one["receipt_count"], one["tx_sig"] or "-", one["merkle_root"]) for one in response["batches"]
    ]
    terminal.print_table(("BATCH", "RECEIPTS", "TRANSACTION", "ROOT"), rows, nothing="no batches")


def _signer(name: str) -> click.Command:
    @click.command(
        name,
        hidden=True,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        add_help_option=False,
    )
    @click.argument("rest", nargs=-1, type=click.UNPROCESSED)
    def refuse(rest: tuple[str, ...]) -> None:
        """Not served: it signs with a key of a chain."""
        raise errors.UnsupportedError(
            f"`chain {name}` of version 1 is not served here: it signs with a key of a chain",
            hint="sign with the chain's own tools; covenant chain flush-receipts makes the batch",
        )

    return refuse


for _name in SIGNERS:
    chain.add_command(_signer(_name))


@click.group()
def budget() -> None:
    """See what agents' budgets were charged."""


@budget.command(epilog=client.examples("covenant budget debits -n 50"))
@client.limit(10)
@client.as_json
def debits(limit: int, as_json: bool) -> None:
    """Show the newest debits."""
    response = client.ask("recent_debits", limit=limit)
    if as_json:
        common.emit(client.envelope("debit_list", response, limit=limit))
        return
    rows = [
        (times.utc(one["at_ms"]), one["agent"]["display"], one["credits"], one["paired_receipt"])
        for one in response["debits"]
    ]
    terminal.print_table(("AT", "AGENT", "CREDITS", "RECEIPT"), rows, nothing="no debits")
