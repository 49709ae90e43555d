"""Credits: who may spend how many an hour, what was taken, and the intents that wait for more."""
