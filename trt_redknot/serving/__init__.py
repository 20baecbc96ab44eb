"""Serving: many requests at once on one engine. A scheduler on rank 0, a loop on every other rank, no Triton import."""
