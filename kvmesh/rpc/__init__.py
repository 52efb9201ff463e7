"""Streams, servers and clients over gRPC."""
