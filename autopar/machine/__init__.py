"""The machine at hand: its devices and ranks, and the command line."""
