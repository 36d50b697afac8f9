"""`gyre view`: a local, read-only page over a run's folder. Run, execution, segment."""
