"""HTTP on the loopback: routes, streams, limits and the OpenAPI document."""
