"""Jobs: work on a client's value that may explode, each in a process of its own that has limits."""
