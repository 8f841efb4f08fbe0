"""A load-test client for any OpenAI server. It knows Baton only from outside, by its URL and its metrics."""
