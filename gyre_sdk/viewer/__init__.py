"""A local page that shows a run: its executions, their branch graphs, and every token. See `gyre view`."""
