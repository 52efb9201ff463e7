"""A simulated engine: no model, but real blocks, real bytes moved and real time taken."""
