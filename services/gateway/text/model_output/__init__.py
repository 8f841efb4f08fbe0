"""Answers of models, told apart into content, reasoning and calls of tools."""
