"""Benchmarks of Baton and its peers: `python -m loadtest NAME`.

`client` and `compare` know Baton only from outside, by its command, its URL and its metrics; `micro` and `gpu` measure
parts of it."""
