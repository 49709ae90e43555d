"""Policies compiled for Kubernetes, Cilium and systemd, with their losses."""
