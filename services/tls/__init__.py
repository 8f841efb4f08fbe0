"""TLS of every port and of every connection that Baton makes."""
