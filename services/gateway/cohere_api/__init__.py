"""Cohere's API over HTTP, version 2: chats and embeddings. Its requests run as those of OpenAI's API do."""
