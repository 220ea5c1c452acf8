"""Benchmarks: Fairlane and its peers side by side, in one run, on one throw-away PostgreSQL."""
