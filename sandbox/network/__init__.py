"""The network of one run: namespaces, the gateway with its firewall, and the gates that stand in it."""
