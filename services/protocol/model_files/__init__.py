"""The files of a model, weights aside: a Hugging Face directory or a GGUF file, read without torch."""
