"""Hold an agent to its policy: all access to the kernel, and the runners."""
