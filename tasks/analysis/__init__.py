"""Questions about a run and its config: explain, plan, reproduce, bisect."""
