"""The mailbox: tasks of agents for agents, leased, answered once, and never lost (ADR 0047)."""
