"""Long-lived workers: models that stay loaded while stages come and go."""
