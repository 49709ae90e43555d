"""Network artefacts read back into grants."""
