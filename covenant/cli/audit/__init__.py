"""Verbs that read and verify the audit logs."""
