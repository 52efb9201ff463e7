"""Chooses workers."""
