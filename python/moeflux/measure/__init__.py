"""Measures models and machines: what they are, what they can do, what they need."""
