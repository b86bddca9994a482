"""Long-lived workers, whose models stay loaded from stage to stage."""
