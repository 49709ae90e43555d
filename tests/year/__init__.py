"""A year of operation in minutes, under a clock that the test moves: ``make year``, docs/year.md."""
