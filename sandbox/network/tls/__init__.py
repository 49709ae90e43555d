"""The TLS gate: ClientHello parser, plan and splice."""
