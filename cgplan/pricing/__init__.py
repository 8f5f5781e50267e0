"""The cost of graphs: measured, or estimated on the CPU."""
