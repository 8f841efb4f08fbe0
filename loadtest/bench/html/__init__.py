"""The page of one run or of several: one file, which needs no network."""
