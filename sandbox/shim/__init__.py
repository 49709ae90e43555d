"""The process that owns one run: signals, standard streams and control socket."""
