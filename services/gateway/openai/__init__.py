"""The OpenAI API over HTTP. Nothing here knows a worker; tokens come from a `Generator`."""
