"""`baton up`: starts workers and a gateway on this machine as processes, and keeps them running."""
