"""The gateway: speaks the OpenAI API, pairs workers for every request, owns each handoff from start to end."""
