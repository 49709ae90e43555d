"""State that the daemon holds beside its stores: feeds, rates, progress and ignore rules."""
