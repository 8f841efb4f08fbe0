"""What a model's files say, weights aside: a Hugging Face directory or a GGUF file, read without torch."""
