"""The `gyre` command."""

from gyre_sdk.cli.app import main

__all__ = ["main"]
