"""Anthropic's Messages API over HTTP: its JSON and its streams of events. Its requests run as chats."""
