"""Read the configuration of another tool as a manifest that never grants more than that configuration did."""
