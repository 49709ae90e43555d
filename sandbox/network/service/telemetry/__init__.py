"""An agent's own OTLP, behind the service gate's name `telemetry.covenant`."""
