"""The backend service: orders to runners, frames from them, the scheduler's loop, training steps over cells,
the router's front.
"""
