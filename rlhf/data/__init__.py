"""Datasets: generating, converting and reading them."""
