"""Runs of the model that measure it."""
