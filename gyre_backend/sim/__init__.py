"""A discrete-event simulator that drives the production scheduler on a simulated clock, and forecasts made
with it."""
