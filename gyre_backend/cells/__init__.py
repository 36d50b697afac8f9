"""Cells: the scheduler's policy, the leases of micro-steps, and the processes that hold an engine and a trainer."""
