"""Agent2Agent (A2A) over HTTP: the agents' cards, JSON-RPC, HTTP+JSON, streams and push notifications."""
