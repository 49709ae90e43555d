"""What each request does, whoever carried it here."""
