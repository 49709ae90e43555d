"""Send rows of the audit logs to other systems, each at least once and in order."""
