"""Computes prompts."""
