"""The workloads: each makes scripts of random contents, or of a file."""
