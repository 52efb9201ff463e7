"""KV blocks: hashes, tickets and the transports that move them."""
