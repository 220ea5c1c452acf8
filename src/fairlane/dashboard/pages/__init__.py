"""One module for each page: what it looks up, and what can be done from it."""
