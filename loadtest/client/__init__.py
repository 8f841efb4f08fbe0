"""A load-test client for any OpenAI server."""
