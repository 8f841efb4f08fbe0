"""The OpenAI API over HTTP: paths, JSON and streams of events. Knows no worker."""
