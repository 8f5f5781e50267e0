"""Several graphs with eager pieces between them."""
