"""Traffic, step times and costs of graphs to a plan with its evidence."""
