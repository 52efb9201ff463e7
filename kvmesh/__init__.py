"""kvmesh: a gRPC mesh for disaggregated LLM inference."""
