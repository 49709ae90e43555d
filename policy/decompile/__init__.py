"""Read artefacts and the live state of a run back into grants, with no code of ``policy.compile``."""
