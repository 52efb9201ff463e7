"""The life of one process of the mesh."""
