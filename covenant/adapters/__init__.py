"""The doors by which clients come: the Unix socket and HTTP. Each carries requests to `covenant.handlers`."""
