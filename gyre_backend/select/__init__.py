"""From sealed branch graphs to training paths and advantages.

Pure: no clock, no I/O, no randomness but a passed seed.
"""
