"""GGUF: models as llama.cpp packs them, read from their one file: tensors, config, tokenizer."""
