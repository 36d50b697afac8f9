"""Exact shared-prefix training: plans, attention over plans, losses at edges."""
