"""What a model wrote, told apart into content, reasoning and calls of tools."""
