"""A mesh in virtual time: the router's own code over simulated workers."""
