"""`baton doctor`: looks at a machine and at running processes, and says what is wrong and what to do."""
