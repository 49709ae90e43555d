"""The DNS gate and the broker that opens the firewall for its answers."""
