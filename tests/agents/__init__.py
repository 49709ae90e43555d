"""Agents that people use, each run through `covenant exec` beside a model that follows a script: ``make agents``."""
