"""Which worker caches which prefix."""
