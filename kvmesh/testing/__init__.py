"""Fakes and helpers for tests of the mesh and of what is built on it."""
