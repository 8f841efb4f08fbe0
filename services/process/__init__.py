"""Parts of every process: its configuration, its log, its end with its parent, the watch on its garbage collector."""
