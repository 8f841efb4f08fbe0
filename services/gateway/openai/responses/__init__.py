"""OpenAI's /v1/responses: requests, their answers, and the responses that are kept for later turns."""
