"""Hugging Face models: their folders, configs, tokenizers and computations."""
