"""Published ports: the places on this host, and the gate that carries their connections to the agent."""
