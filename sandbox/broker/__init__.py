"""What a running agent may ask: credentials, children and packages."""
