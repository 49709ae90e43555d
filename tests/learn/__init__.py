"""Twenty programs, each learnt from one run, run again by what was learnt, and compared with a manifest by hand."""
