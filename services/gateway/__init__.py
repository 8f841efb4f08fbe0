"""The gateway: speaks the OpenAI API and gRPC, routes every request, owns each attempt from start to end."""
