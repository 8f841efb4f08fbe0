"""The load client: sends a workload to any OpenAI server, and says how fast it answered."""
