"""Keys and signatures of operators: keystore, ssh-agent, signing and the trust root."""
