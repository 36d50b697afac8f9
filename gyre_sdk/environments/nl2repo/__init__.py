"""NL2RepoBench tasks: build a whole project from its specification, graded by hidden tests."""

from gyre_sdk.environments.nl2repo.grader import verify_repo
from gyre_sdk.environments.nl2repo.reader import is_task, load

__all__ = ["is_task", "load", "verify_repo"]
