"""The stages of an iteration, one file each; `tasks/pipeline.py` lists them in order."""
