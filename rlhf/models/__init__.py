"""Hugging Face models: their folders, configs and tokenizers, and what computes with them."""
