"""Fairlane inside the frameworks that programs are built with: a module for each, named after it."""
