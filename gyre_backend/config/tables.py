"""The backend's tables of a TOML file. Every field says its unit; unknown keys are refused."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

TrainedRole = Literal["main", "main-summary", "subagent", "subagent-summary"]


class Table(pydantic.BaseModel):
    """Base: frozen, and unknown keys are errors."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class ModelTable(Table):
    """`[model]`: what is trained."""

    path: str = "smollm2"
    """Folder of a Hugging Face causal model, or a name that `python -m gyre_backend.models` can make."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of weights, gradients and optimizer state."""
    autocast: Literal["", "bfloat16"] = ""
    """Type of the matrix products, when it is not the weights'."""
    device: str = "cpu"
    """torch device of a cell's replica: cpu, cuda."""
    context: int = pydantic.Field(default=0, ge=0)
    """Longest prompt plus reply in tokens; 0 takes the model's own limit."""


class AlgorithmTable(Table):
    """`[algorithm]`: the loss and the advantage; see `gyre_backend.algorithms`."""

    name: str = "grpo"
    """grpo | dapo | dr_grpo | cispo | gspo | reinforce ..., as the algorithms register themselves."""
    estimator: str = ""
    """Advantage estimator; empty takes the algorithm's own."""
    roles: tuple[str, ...] = ("main", "main-summary", "subagent", "subagent-summary")
    """Roles that are trained, in the order in which their leaves are taken."""
    j_max: int = pydantic.Field(default=5, ge=0)
    """Paths taken per execution; 0 takes all."""
    equal_rewards: Literal["skip", "keep"] = "skip"
    """A group whose executions all have the same reward: out of the step, or in it with advantage 0."""
    placeholders: Literal["count", "drop"] = "drop"
    """Executions with nothing to grade: reward 0 in the baseline, or out of it like invalid ones."""
    seed: int = 0
    """Seed of the selection's draws."""
    role_credit: dict[TrainedRole, float] = {}
    """Factor of the advantage per role, 1 for a role not named: {subagent = 0.5}."""
    credit_discount: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Factor of the advantage for each call between a token's own and the last of its path; 1 gives all the same."""
    options: dict[str, Any] = {}
    """Parameters of the algorithm, by name (clip ranges, importance-weight bounds ...)."""


class TrainTable(Table):
    """`[train]`: steps, batches and the optimizer."""

    steps: int = pydantic.Field(default=10, ge=0)
    """Optimizer steps to do; 0 goes on until it is stopped."""
    group_size: int = pydantic.Field(default=4, ge=1)
    """Executions of a group (G): they share a baseline."""
    groups_per_step: int = pydantic.Field(default=1, ge=1)
    """Groups that one optimizer step consumes (B)."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks to train on, among those that runners offer; empty takes all."""
    task_order: Literal["cycle", "shuffle"] = "cycle"
    """How tasks follow each other: in their order, or shuffled anew in every round."""
    seed: int = 0
    """Seed of the tasks' order."""
    data_order: Literal["ready", "dispatched"] = "ready"
    """Which groups a step takes: those ready first, or strictly those dispatched first (slower,
    reproducible).
    """
    final_groups: int = pydantic.Field(default=0, ge=0)
    """Groups ordered after the last step, with the policy it made; a run that goes on trains on them first."""
    max_dropped: int = pydantic.Field(default=100, ge=1)
    """Groups in a row that end with nothing to train before the run gives up."""
    micro_tokens: int = pydantic.Field(default=8192, ge=1)
    """Most unique tokens of a micro-step; a larger group is split where that is exact."""
    trainer: Literal["hf", "fsdp", "megatron"] = "hf"
    lr: float = pydantic.Field(default=1e-6, gt=0)
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = pydantic.Field(default=1e-8, gt=0)
    weight_decay: float = pydantic.Field(default=0.01, ge=0)
    warmup_steps: int = pydantic.Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    max_grad_norm: float = pydantic.Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 turns it off."""
    gradient_checkpointing: bool = False
    temperature: float = pydantic.Field(default=1.0, gt=0)
    """The sampler's temperature, at which logprobs are computed; `sampling.temperature` of the same file when
    not given.
    """
    logits_chunk: int = pydantic.Field(default=1024, ge=1)
    """Loss edges whose logits are held at once."""
    bounded_memory: bool = False
    """Compute one segment at a time: memory of one path, some recomputation."""
    attention: str = "auto"
    """Back end of tree attention: auto | rect | rows | dense | flash | flex."""
    ref_model: str = ""
    """Folder of the reference policy; needed by KL terms only."""
    options: dict[str, Any] = {}
    """What only one trainer knows (Megatron's parallel sizes ...)."""
    checkpoint_every: int = pydantic.Field(default=1, ge=0)
    """Optimizer steps between checkpoints; 0 writes only the last one."""
    keep_checkpoints: int = pydantic.Field(default=2, ge=1)
    """Checkpoints that are kept; older ones are removed."""


class SchedulerTable(Table):
    """`[scheduler]`: when cells change sides. A preset, and what differs from it."""

    preset: Literal["gyre", "paper", "step-switch", "async", "colocate"] = "gyre"
    options: dict[str, Any] = {}
    """Fields of `gyre_backend.cells.policy.PolicyConfig` that override the preset's."""
    tick_s: float = pydantic.Field(default=0.25, gt=0)
    """Seconds between two looks at the clock; everything else is driven by events."""


class CellsTable(Table):
    """`[cells]`: how many replicas there are, and where they run."""

    count: int = pydantic.Field(default=1, ge=1)
    """Cells (K). The first is the core: it owns the optimizer."""
    slots: int = pydantic.Field(default=4, ge=1)
    """Executions that one cell in rollout serves at the same time (C_e)."""
    runtime: Literal["local", "ray"] = "local"
    """local: a process per cell on this machine. ray: a placement group per cell (extra `ray`)."""
    preload: bool = True
    """Fork local cells from a process that has imported torch already: a replacement is up in a second or
    two.
    """
    exact_sum: bool = False
    """Sum gradients micro-step by micro-step in a fixed order: bit-identical whatever cells took part, at the
    price of
    one gradient copy in memory per micro-step."""
    start_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """Seconds a cell may take to load its model."""
    call_timeout_s: float = pydantic.Field(default=120.0, gt=0)
    """Seconds a cell may take to answer a control call; after that it counts as hung and is replaced."""
    micro_timeout_s: float = pydantic.Field(default=900.0, gt=0)
    """Seconds a cell may take for one micro-step, or for the optimizer step."""
    heartbeat_s: float = pydantic.Field(default=2.0, gt=0)
    """Seconds between two looks at whether a cell still answers."""
    hang_s: float = pydantic.Field(default=30.0, gt=0)
    """Seconds without an answer after which a cell counts as hung and is replaced."""
    max_restarts: int = pydantic.Field(default=100, ge=0)
    """Replacements of dead cells before the run gives up."""
    env: dict[str, str] = {}
    """Environment of the cells' processes (CUDA_VISIBLE_DEVICES, NCCL settings ...)."""
    ray_address: str = ""
    """Ray cluster to join; empty starts one on this machine."""
    ray_resources: dict[str, float] = {"CPU": 1.0}
    """Resources of one cell's placement group."""


class EngineTable(Table):
    """`[engine]`: what generates."""

    kind: Literal["embedded", "sglang"] = "embedded"
    """embedded: in the cell's process, on the trainer's own weights. sglang: a server per cell, or one that
    runs.
    """
    url: str = ""
    """A running SGLang server (one cell only); empty launches one per cell."""
    command: tuple[str, ...] = ()
    """Command that launches SGLang; `{model}` and `{port}` are replaced. Empty: `python -m
    sglang.launch_server ...`.
    """
    options: dict[str, Any] = {}
    """Arguments of the embedded engine (max_batch, kv_tokens ...)."""
    start_timeout_s: float = pydantic.Field(default=300.0, gt=0)


class RouterTable(Table):
    """`[router]`: the one `/generate` front of all cells."""

    max_waiting: int = pydantic.Field(default=4096, ge=1)
    """Calls that may wait for a place on an engine; one more is answered 429."""
    queue_s: float = pydantic.Field(default=1800.0, gt=0)
    """Seconds a new call may wait for a place, then 429. A call that has begun is never dropped for
    waiting.
    """
    retries: int = pydantic.Field(default=8, ge=0)
    """Attempts in a row that add no token, over all engines, before a call fails."""
    reserve_s: float = pydantic.Field(default=5.0, ge=0)
    """Seconds a move waits for a place elsewhere before it takes a call off an engine that leaves."""
    abort_s: float = pydantic.Field(default=10.0, gt=0)
    """Seconds an engine may take to answer an abort."""
    kv_migration: Literal["prefill", "embedded", "sglang-hicache"] = "prefill"
    """What happens to a moved call's keys and values: computed again, pulled by the target, or found in a
    shared store.
    """


class WeightsTable(Table):
    """`[weights]`: how weights and gradients travel between cells."""

    transport: Literal["auto", "mooncake", "file"] = "auto"
    """auto takes Mooncake when it is installed, else a folder that the cells share."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    """RDMA device names for Mooncake, comma-separated."""
    host: str = "auto"
    """Address under which cells reach each other; auto: loopback with the local runtime, the node's with
    Ray.
    """
    delta: bool = False
    """Send only elements that changed to cells that hold the previous version. Pays for bfloat16 weights and
    small steps;
    costs the source one copy of the weights."""
    deadline_s: float = pydantic.Field(default=60.0, gt=0)
    """Seconds for one transfer; never less than Mooncake's own MC_TRANSFER_TIMEOUT + 2."""


class MonitorsTable(Table):
    """`[monitors]`: where the metrics of steps go besides `metrics.jsonl`."""

    use: tuple[str, ...] = ()
    """tensorboard | wandb | trackio (extras of the same names), or `package.module:Class` for one of your own."""
    project: str = "gyre"
    name: str = ""
    """Of the run; empty takes the name of its folder."""
    options: dict[str, dict[str, Any]] = {}
    """Settings of one monitor, by its name: `[monitors.options.wandb] mode = "offline"`."""
