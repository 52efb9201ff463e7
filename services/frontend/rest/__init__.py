"""OpenAI's REST API, over the same pipeline as gRPC."""
