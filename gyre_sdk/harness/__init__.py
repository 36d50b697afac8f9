"""Running harnesses: presets for known CLIs, the runner of one execution, the pool of many, orders from a backend."""
