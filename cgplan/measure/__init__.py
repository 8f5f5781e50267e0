"""Runs of the model that measure it: benchmarks, baselines, calibrated and estimated costs."""
