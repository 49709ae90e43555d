"""Who asks and what they may do: authentication, authorization and secrets."""
