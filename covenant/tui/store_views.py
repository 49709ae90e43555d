"""The views of what the daemon keeps: memory, and receipts with budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from covenant.tui import filters, view
from covenant.tui.sources import Sources
from covenant.tui.view import Column, Loaded, Row, View, ViewRequest

_TIERS: Final = ("working", "episodic", "longterm")


class MemoryView(View):
    """Records of memory, the newest first. The daemon searches for the words of the filter, by meaning and words."""

    key, name, title = "m", "memory", "records of memory; the filter searches"
    columns = (Column("TIME", 14), Column("TIER", 8), Column("OWNER", 16), Column("TEXT"))
    seconds: ClassVar[float] = 5.0

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        terms = filters.parse(asked.text, self.heads)
        query = " ".join(term.word for term in terms if not term.column and not term.absent)
        named = [term.word for term in terms if term.column == "tier" and not term.absent]
        tier = next((one for one in _TIERS if named and one.startswith(named[0])), None)
        if query:
            found = sources.daemon("search_memory", query=query, tier=tier, limit=asked.limit)["records"]
        else:
            found = sources.daemon("recent_memory", tier=tier, limit=asked.limit)["records"]
        return Loaded(tuple(_record(one) for one in found), more=len(found) >= asked.limit)

    def terms(self, text: str) -> tuple[filters.Term, ...]:
        """Return the terms that the daemon has not searched for."""
        return tuple(term for term in super().terms(text) if term.column or term.absent)


def _record(one: Mapping[str, Any]) -> Row:
    cells = (view.moment(one["created_at"]), one["tier"], one["owner"]["display"], view.first_line(one["text"]))
    about = {
        "id": one["id"],
        "tier": one["tier"],
        "owner": f"{one['owner']['display']} {one['owner']['pubkey']}",
        "parent": one.get("parent"),
        "metadata": one.get("metadata"),
        "text": one["text"],
    }
    return Row(one["id"], cells, data=about)


class ReceiptsView(View):
    """Receipts of what was used, debits of budgets, and the budgets of agents."""

    key, name, title = "r", "receipts", "receipts, debits and budgets"
    columns = (
        Column("TIME", 14),
        Column("KIND", 8),
        Column("WHO", 22),
        Column("CREDITS", 8, right=True),
        Column("ABOUT"),
    )

    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        receipts = sources.daemon("recent_receipts", limit=asked.limit)["receipts"]
        debits = sources.daemon("recent_debits", limit=asked.limit)["debits"]
        agents = sources.daemon("list_agents")["agents"]
        made = [(one["settled_at"], _receipt(one)) for one in receipts] + [
            (one["at_ms"], _debit(one)) for one in debits
        ]
        budgets = [_budget(one) for one in agents if one.get("id") and one["budget_credits_per_hour"]]
        rows = [row for _, row in sorted(made, key=lambda item: -item[0])]
        return Loaded((*budgets, *rows), more=max(len(receipts), len(debits)) >= asked.limit)


def _receipt(one: Mapping[str, Any]) -> Row:
    batch = "not in a batch" if one.get("batch_id") is None else f"batch {str(one['batch_id'])[:12]}"
    cells = (view.moment(one["settled_at"]), "receipt", one["payer"]["display"], str(one["credits_consumed"]),
             f"{one['resource']}, {batch}")  # fmt: skip
    return Row(f"receipt {one['id']}", cells, data=one)


def _debit(one: Mapping[str, Any]) -> Row:
    about = f"receipt {one['paired_receipt'][:8]}"
    cells = (view.moment(one["at_ms"]), "debit", one["agent"]["display"], str(one["credits"]), about)
    return Row(f"debit {one['paired_receipt']} {one['at_ms']} {one['agent']['pubkey']}", cells, data=one)


def _budget(one: Mapping[str, Any]) -> Row:
    credit = one["budget_credits_per_hour"]
    return Row(f"budget {one['id']}", ("", "budget", one["id"], str(credit), "an hour, by its manifest"), data=one)
