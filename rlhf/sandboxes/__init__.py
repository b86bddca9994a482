"""Sandboxes: folders and limits in which commands of the policy run."""
