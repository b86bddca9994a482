"""What a run is in a store: objects, the commit log, its records, manifests. Knows no model, no reward, no worker."""
