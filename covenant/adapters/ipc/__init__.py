"""The daemon's Unix socket: connections, framing and limits."""
