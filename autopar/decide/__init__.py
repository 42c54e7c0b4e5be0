"""Decide: the solver's picks become a plan, which the referee prices again."""
