"""Fairlane: a durable job queue in which every tenant gets its turn."""
