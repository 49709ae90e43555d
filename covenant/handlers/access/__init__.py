"""Authentication, authorization and secrets of callers."""
