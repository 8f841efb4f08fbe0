"""The prefix index: which worker caches which prefix."""
