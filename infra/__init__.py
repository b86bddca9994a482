"""Where runs live and what computes them: store, commit log, drivers and workers. Knows no Prefect."""
