"""The one door to the kernel and to runsc: system calls, file systems, cgroups, netlink, processes and seccomp."""
