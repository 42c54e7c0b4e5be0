"""Propose: every way to run each operator, and which parts of a model repeat."""
