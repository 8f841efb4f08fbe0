"""The answers of a model, held against those of another one, or of the same one stored in fewer bits."""
