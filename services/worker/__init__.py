"""The code that both roles share: the streams, the threads, and the state that meets on the engine thread."""
