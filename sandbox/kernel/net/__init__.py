"""Netlink, nftables, conntrack and network namespaces."""
