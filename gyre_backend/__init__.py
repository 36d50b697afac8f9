"""Gyre's backend: cell scheduling and exact shared-prefix training of branch graphs."""
