"""The cost model: every number that turns work into simulated seconds is here, and nowhere else.

Rollout is processor sharing. An execution needs `D` *virtual* seconds: the wall-clock it would take with its
cell at the reference load. Of it the share `tool_share` is spent outside the engine (tools, sandbox, harness)
and is never slowed; the rest is decoding, slowed by the load x = running executions per rollout cell:

    slow(x)  = (1 + x / load_scale) / (1 + reference_load / load_scale)         slow(reference_load) = 1
    speed(x) = 1 / (tool_share + (1 - tool_share) * slow(x))                    virtual seconds per second

so throughput x * speed(x) rises with load and saturates, as continuous batching does. With no cell in rollout
speed = 0.

Training a group costs `train_s_per_hour` cell-seconds per virtual hour its executions generated (a cell
alone; n cells are n times as fast), or, for workloads that carry token counts, `train_s_per_token` per unique
trained token. The work is cut into `micro_steps_per_group` equal micro-steps, the unit that cells claim.
"""

from __future__ import annotations

import math

import msgspec

from gyre_sdk.errors import ConfigError

# Mean forward-backward time over 42 steps relative to all trajectories, by J_max (the paper's ablation, from
# digests).
JMAX_TRAIN_SHARE = {1: 0.414, 5: 0.748, None: 1.0}


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of everything. Defaults: the published switch times, and the prototype's assumptions for the
    rest."""

    to_training_s: float = 8.52
    """Rollout to training (published)."""
    to_rollout_s: float = 3.46
    """Training to rollout (published)."""
    pull_s: float = 0.0
    """Extra time of a satellite that joins: pulling the weight snapshot."""
    step_s: float = 30.0
    """Optimizer step, reduction and publishing, per step (assumed)."""
    gather_s: float = 0.0
    """Collecting one satellite's gradient at the step's end."""
    reroute_s: float = 10.0
    """Virtual seconds an execution loses when its cell leaves rollout: the prefix is computed again elsewhere
    (assumed)."""
    tool_share: float = 0.3
    load_scale: float = 24.0
    """n0: executions per cell at which decoding takes twice as long as for one alone."""
    reference_load: float = 32.0
    """nref: executions per cell at which virtual time equals real time."""
    train_s_per_hour: float = 135.0
    """Cell-seconds of training per virtual hour generated."""
    train_s_per_token: float = 0.0
    """Cell-seconds per unique trained token; used instead of `train_s_per_hour` where the workload has token
    counts."""
    micro_steps_per_group: int = 4

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"costs.{name} must be a finite number >= 0, got {value}")
        if self.load_scale <= 0 or self.micro_steps_per_group < 1 or self.tool_share > 1:
            raise ConfigError("costs: need load_scale > 0, micro_steps_per_group >= 1 and tool_share <= 1")

    def speed(self, load: float) -> float:
        """Virtual seconds per second of each execution when every rollout cell runs `load` of them."""
        slow = (1 + load / self.load_scale) / (1 + self.reference_load / self.load_scale)
        return 1 / (self.tool_share + (1 - self.tool_share) * slow)

    def train_seconds(self, virtual_s: float, tokens: float = 0.0) -> float:
        """Training work of one execution, cell-seconds."""
        if tokens and self.train_s_per_token:
            return tokens * self.train_s_per_token
        return virtual_s / 3600 * self.train_s_per_hour


def seconds_per_token(active_parameters: float, cell_flops: float, mfu: float) -> float:
    """Training time per token of a cell: 6 FLOP per active parameter and token, at `mfu` of `cell_flops` per
    second."""
    return 6 * active_parameters / (cell_flops * mfu)
