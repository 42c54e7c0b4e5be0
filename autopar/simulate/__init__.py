"""Simulate: a program is simulated on the streams of one rank."""
