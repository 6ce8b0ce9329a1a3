"""Searches for a method's settings, on validation alone."""
