"""The half of ``covenant memory`` that keeps it in order: compaction, repair, and receipts that lack their records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from covenant.cli import common
from covenant.cli.daemon import client

_apply = click.option("--apply", is_flag=True, help="Do it; otherwise only say what would be done.")
_reason = click.option("--reason", required=True, help="Why: it stands in the log.")


def _policy(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a compaction."""
    options = [click.option("--detach-stale-parents", is_flag=True, help="Take away parents that are not there.")]
    for what, tier in (("delete", "working"), ("delete", "episodic"), ("mark", "longterm-stale")):
        for form in ("before-ms", "older-than-ms"):
            when = form.removesuffix("-ms").replace("-", " ")
            text = f"{what.capitalize()} {tier.replace('-', ' as ')} records {when} this."
            options.append(click.option(f"--{what}-{tier}-{form}", type=client.MILLISECONDS, help=text))
    options.append(click.option("--marked-at-ms", type=client.MILLISECONDS, help="The time that marks bear; now."))
    for option in reversed(options):
        command = option(command)
    return command


def _order(given: dict[str, Any]) -> dict[str, Any]:
    def cut(what: str) -> int | None:
        before, older = given[f"{what}_before_ms"], given[f"{what}_older_than_ms"]
        return client.either(before, older, option=what.replace("_", "-") + "-")

    return {
        "delete_working_before_ms": cut("delete_working"),
        "delete_episodic_before_ms": cut("delete_episodic"),
        "mark_longterm_stale_before_ms": cut("mark_longterm_stale"),
        "detach_stale_parents": given["detach_stale_parents"],
        "marked_at_ms": given["marked_at_ms"],
    }


def _compact(mode: str, reason: str, given: dict[str, Any]) -> dict[str, Any]:
    order = {"mode": mode, "policy": _order(given), "reason": reason}
    with client.daemon() as daemon:
        return daemon.ask("compact_memory", request=order)


@click.command(
    epilog=client.examples(
        'covenant memory compact --reason "monthly" --delete-working-older-than-ms 2592000000',
        'covenant memory compact --reason "monthly" --detach-stale-parents --apply',
    )
)
@_policy
@_reason
@_apply
@client.as_json
def compact(reason: str, apply: bool, as_json: bool, **given: Any) -> None:
    """Delete old records, mark stale ones, and take away parents that are not there."""
    response = _compact("apply" if apply else "dry_run", reason, given)
    outcome = response["outcome"]
    if as_json:
        common.emit(client.envelope("memory_compacted", response))
        return
    word = "" if apply else "would be "
    common.say(
        f"{len(outcome['deleted'])} records {word}deleted, {len(outcome['stale_marked'])} {word}marked stale, "
        f"{len(outcome['parents_detached'])} {word}without their parents"
    )
    if outcome.get("not_shown"):
        common.say(f"and {outcome['not_shown']} more of these, which the answer had no room to name")
    if not apply and outcome["would_change"]:
        common.say("nothing was done: --apply does it", err=True)


@click.command(
    "plan-compaction",
    epilog=client.examples('covenant memory plan-compaction --reason "a look" --detach-stale-parents'),
)
@_policy
@_reason
@click.option("--json", "as_json", is_flag=True, help="It is always one JSON document.")
def plan_compaction(reason: str, as_json: bool, **given: Any) -> None:
    """Print what a compaction would do, as JSON. Nothing is changed."""
    plan = _compact("dry_run", reason, given)
    # Version 1's names: a compaction leaves receipts as they are, whichever records it deletes.
    receipts = {"mode": "none", "records": [], "reason": "a compaction changes no receipt"}
    common.emit(client.envelope("memory_compaction_plan", plan, expected_receipt_changes=receipts))


@click.command("plan-receipt-backfill", epilog=client.examples("covenant memory plan-receipt-backfill --limit 500"))
@client.limit(100)
@click.option("--json", "as_json", is_flag=True, help="It is always one JSON document.")
def plan_receipt_backfill(limit: int, as_json: bool) -> None:
    """Print which of the newest records and receipts lack each other, as JSON. Nothing is changed."""
    with client.daemon() as daemon:
        records = daemon.ask("recent_memory", limit=limit)["records"]
        receipts = daemon.ask("recent_receipts", limit=limit)["receipts"]
    common.emit({"kind": "memory_receipt_backfill_plan", "mode": "dry_run", "limit": limit, **_plan(records, receipts)})


def _plan(records: list[dict[str, Any]], receipts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return version 1's plan: each receipt of memory without a record, with the first record of the same owner that
    has no receipt."""
    of_memory = [one for one in receipts if one["resource"] == "memory"]
    paid = {one.get("memory_record_id") for one in of_memory}
    free = [one for one in records if one["id"] not in paid]
    pairs, alone = [], []
    for receipt in (one for one in of_memory if one.get("memory_record_id") is None):
        about = {
            "receipt_id": receipt["id"],
            "payer_display": receipt["payer"]["display"],
            "payer_pubkey": receipt["payer"]["pubkey"],
            "credits_consumed": receipt["credits_consumed"],
        }
        record = next((one for one in free if one["owner"]["pubkey"] == receipt["payer"]["pubkey"]), None)
        if record is None:
            alone.append({**about, "reason": "no record of the payer lacks a receipt"})
            continue
        free.remove(record)
        owner = {"memory_owner_display": record["owner"]["display"], "memory_owner_pubkey": record["owner"]["pubkey"]}
        why = {"status": "candidate", "reason": "neither names another, and they have one owner"}
        pairs.append({**about, "memory_record_id": record["id"], **owner, **why})
    lacking = [
        {
            "memory_record_id": one["id"],
            "owner_display": one["owner"]["display"],
            "owner_pubkey": one["owner"]["pubkey"],
            "tier": one["tier"],
            "reason": "no receipt of the owner lacks a record",
        }
        for one in free
    ]
    does = "this verb changes nothing: covenant settlement backfill-receipts does it"
    return {
        "mutation_supported": False,
        "records": pairs,
        "unmatched_legacy_receipts": alone,
        "unmatched_memory_records": lacking,
        "refusal": {"apply_supported": False, "reason": does},
    }


@click.command(
    "backfill-receipt-correlation",
    epilog=client.examples(
        "covenant memory backfill-receipt-correlation --dry-run", "covenant memory backfill-receipt-correlation"
    ),
)
@click.option("--dry-run", is_flag=True, help="Only say how many.")
@client.as_json
def backfill_receipt_correlation(dry_run: bool, as_json: bool) -> None:
    """Write into records which receipt is theirs."""
    with client.daemon() as daemon:
        response = daemon.ask("backfill_memory_records", dry_run=dry_run)
    if as_json:
        body = {name: value for name, value in response.items() if name != "kind"}
        common.emit({"schema": "covenant.memory.backfill.v1", **body})
    else:
        common.say(f"{response['row_count']} records {'would be ' if dry_run else ''}given their receipt")


@click.group()
def repair() -> None:
    """Repair one record."""


@repair.command(
    "detach-parent",
    epilog=client.examples(
        'covenant memory repair detach-parent 6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11 --reason "gone" --apply'
    ),
)
@click.argument("record_id")
@click.option("--expected-parent", metavar="ID", help="Only where it is this one.")
@_reason
@_apply
@client.as_json
def detach_parent(record_id: str, expected_parent: str | None, reason: str, apply: bool, as_json: bool) -> None:
    """Take the parent of RECORD_ID away."""
    command = {"action": "detach_parent", "id": record_id, "expected_parent": expected_parent}
    _repair(command, reason, apply=apply, as_json=as_json)


@repair.command(
    epilog=client.examples(
        'covenant memory repair delete 6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11 --reason "empty" --apply'
    )
)
@click.argument("record_id")
@_reason
@_apply
@client.as_json
def delete(record_id: str, reason: str, apply: bool, as_json: bool) -> None:
    """Delete RECORD_ID."""
    _repair({"action": "delete_record", "id": record_id}, reason, apply=apply, as_json=as_json)


@repair.command(
    "backfill-provenance",
    epilog=client.examples(
        "covenant memory repair backfill-provenance 6f0c3c2e-5f4b-4d0a-9a54-1c1f6e0f7a11 "
        """--reason "known" --provenance '{"from": "import"}'"""
    ),
)
@click.argument("record_id")
@click.option("--provenance", metavar="JSON", required=True, help="Where it came from.")
@_reason
@_apply
@client.as_json
def backfill_provenance(record_id: str, provenance: str, reason: str, apply: bool, as_json: bool) -> None:
    """Write into RECORD_ID where it came from."""
    origin = client.document(provenance, option="--provenance")
    command = {"action": "backfill_provenance", "id": record_id, "provenance": origin}
    _repair(command, reason, apply=apply, as_json=as_json)


def _repair(command: dict[str, Any], reason: str, *, apply: bool, as_json: bool) -> None:
    order = {"mode": "apply" if apply else "dry_run", "command": command, "reason": reason}
    response = client.ask("repair_memory", request=order)
    if as_json:
        common.emit(client.envelope("memory_repaired", response))
        return
    outcome = response["outcome"]
    word = "changed" if outcome["changed"] else "would change" if outcome["would_change"] else "is as it should be"
    common.say(common.visible(f"{outcome['id']}: {outcome['action']}: {word}"))
    if outcome["would_change"] and not apply:
        common.say("nothing was done: --apply does it", err=True)


UPKEEP: tuple[click.Command, ...] = (
    compact,
    plan_compaction,
    plan_receipt_backfill,
    backfill_receipt_correlation,
    repair,
)
