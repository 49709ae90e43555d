"""What holds an agent to its policy: the only door to the kernel, and the runners."""
