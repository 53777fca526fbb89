"""Draws of p(x | y) for measurements y = A x + noise."""
