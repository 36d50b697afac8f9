"""Where the metrics of steps go besides `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, or a class of your own."""

from gyre_backend.monitors.base import Monitor, RunFacts, flat_numbers
from gyre_backend.monitors.fan_out import FanOut
from gyre_backend.monitors.registry import MONITORS, make_monitors

__all__ = ["MONITORS", "FanOut", "Monitor", "RunFacts", "flat_numbers", "make_monitors"]
