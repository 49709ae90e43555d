"""The supervisor's log: events, open runs, reports, archive and denials."""
