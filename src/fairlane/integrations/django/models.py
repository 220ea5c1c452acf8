"""No models: Fairlane keeps its own schema. Django sends `post_migrate` only to apps that have this module."""
