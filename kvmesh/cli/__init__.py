"""The `kvmesh` command. It knows the services by their module names alone."""
