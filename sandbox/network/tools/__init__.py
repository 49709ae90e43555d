"""The tools of a run: a process that holds each call to the manifest, and its line to the supervisor."""
