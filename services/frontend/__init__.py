"""Owns the life of every request: the public face of the mesh."""
