"""Trainers: one protocol (`base`), and what implements it."""

from gyre_backend.trainers.base import create

__all__ = ["create"]
