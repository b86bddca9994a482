"""Train engines: models that are trained on one process or on many."""
