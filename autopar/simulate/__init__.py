"""Simulate: a program is played on the streams of one rank."""
