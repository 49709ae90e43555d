"""Other agents over A2A, behind the service gate's name `agents.covenant`."""
