"""Storage and execution of runs: store, commit log, drivers and workers. Independent of Prefect."""
