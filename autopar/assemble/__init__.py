"""Assemble: the integer problem of a graph: what to choose, what it costs, and what it holds when."""
