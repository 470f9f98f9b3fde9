"""A small paged torch engine whose KV cache lives in aiokv's two tiers."""
