"""HTTP under the gateway's APIs: one request and its answer, routes, and the server below. Knows no API."""
