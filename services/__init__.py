"""The processes of the mesh, one package a role."""
