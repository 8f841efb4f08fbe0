"""Files that change while a process runs."""
