"""Agent2Agent (A2A) on the wire, without input or output: calls in, tasks, cards and errors out, in versions 0.3 and
1.0."""
