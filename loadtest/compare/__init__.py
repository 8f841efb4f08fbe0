"""`python -m loadtest compare`: Baton and a peer in turn, on the same cores, by the same client, as ratios."""
