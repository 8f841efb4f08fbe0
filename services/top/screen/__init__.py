"""The screens of `baton top`. Textual is imported here alone."""
