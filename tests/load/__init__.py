"""Many intents from many clients at once, and a daemon that is killed in the middle: ``make load``."""
