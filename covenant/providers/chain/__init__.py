"""The settlement chain: interface, transactions and a local virtual machine."""
