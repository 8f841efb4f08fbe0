"""The gateway's side of the console: a stream of events for browser pages and terminals, and the pages themselves."""
