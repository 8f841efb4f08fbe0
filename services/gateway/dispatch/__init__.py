"""Asks workers for tokens: routing, attempts, the ledger, streams to workers. Knows no API and no text."""
