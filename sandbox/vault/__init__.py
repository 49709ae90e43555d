"""Where secrets lie: an interface, the embedded file, and OpenBao (docs/adr/0035-secrets-by-name.md)."""
