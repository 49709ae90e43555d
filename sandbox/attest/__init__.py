"""Read the kernel back and compare it with the policy."""
