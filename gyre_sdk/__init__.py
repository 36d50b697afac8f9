"""Gyre's SDK: sits in front of an agent harness and records what the policy really sampled, as a branch graph."""
