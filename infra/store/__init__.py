"""The storage of a run: objects, commit log, records and manifests. Independent of models, rewards and workers."""
