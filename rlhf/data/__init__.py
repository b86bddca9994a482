"""Generates, converts and reads datasets."""
