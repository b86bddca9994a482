"""Weights as they are stored, sharded over ranks, digested and sent."""
