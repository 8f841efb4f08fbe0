"""Groups whose ranks are on several hosts, one on each."""
