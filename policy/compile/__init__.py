"""Compile effective grants to artefacts: the OCI specification, seccomp, cgroups, mounts and rules of the network."""
