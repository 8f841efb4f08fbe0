"""What a running gateway tells consoles, in a terminal: `baton top`, `baton ls` and `baton requests`."""
