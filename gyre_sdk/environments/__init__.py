"""Tasks, the sandboxes they run in, and how they are graded."""

from gyre_sdk.environments.grading import GradeBudget, StepGrade, combine, grade, grade_step
from gyre_sdk.environments.load import load_task, load_tasks
from gyre_sdk.environments.prepare import TaskSandbox, make_sandbox
from gyre_sdk.environments.sandbox.base import Capabilities, ExecResult, Limits, Network, Sandbox, SandboxProcess
from gyre_sdk.environments.steps import prepare_step, run_solution, run_steps
from gyre_sdk.environments.task import Step, Task
from gyre_sdk.wire.records import Outcome

__all__ = [
    "Capabilities",
    "ExecResult",
    "GradeBudget",
    "Limits",
    "Network",
    "Outcome",
    "Sandbox",
    "SandboxProcess",
    "Step",
    "StepGrade",
    "Task",
    "TaskSandbox",
    "combine",
    "grade",
    "grade_step",
    "load_task",
    "load_tasks",
    "make_sandbox",
    "prepare_step",
    "run_solution",
    "run_steps",
]
