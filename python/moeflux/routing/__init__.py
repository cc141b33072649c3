"""Which experts routers pick: traces of it, cache policies played against them, hit rates."""
