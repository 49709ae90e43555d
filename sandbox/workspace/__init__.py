"""The caller's directory behind an overlay: made for a run, compared, applied."""
