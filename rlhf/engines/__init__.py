"""Rollout and train engines, behind two protocols; all engines of a protocol pass the same contract tests."""
