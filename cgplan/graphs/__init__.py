"""One captured graph, and what it depends on."""
