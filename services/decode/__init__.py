"""Generates tokens."""
