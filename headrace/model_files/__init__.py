"""A model's files without its weights: config, tokenizer, templates, from a directory, a GGUF file or a hub."""
