"""The Megatron-core trainer: one object that drives all ranks of a tensor-, pipeline- and data-parallel run.

It starts from a Hugging Face folder and exports one, bitwise the same numbers: see `megatron_weights`. What
drives the ranks is `ranked.RankedTrainer`; what a rank does is `megatron_replica.Replica`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from gyre_backend.algorithms.batch import Algorithm
from gyre_backend.errors import UnsupportedError
from gyre_backend.trainers import megatron_layout, megatron_weights
from gyre_backend.trainers.base import TrainerConfig
from gyre_backend.trainers.files import copy_companions, new_folder
from gyre_backend.trainers.megatron_replica import Setup
from gyre_backend.trainers.ranked import DTYPES, RankedTrainer
from gyre_sdk.errors import MissingExtraError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions:
    """`TrainerConfig.options` of this trainer."""

    tp: int = 1
    """tensor-parallel ranks"""
    pp: int = 1
    """pipeline stages"""
    dp: int = 1
    """data-parallel replicas inside this trainer (cells are replicas of a higher order)"""
    recompute: str = "none"
    """none | selective (attention) | full (every layer); `gradient_checkpointing` means full"""
    distributed_optimizer: bool = True
    """optimizer state split over the replicas"""
    micro_batches: int = 0
    """parts a plan is cut into per replica; 0: as many as there are pipeline stages"""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @classmethod
    def of(cls, config: TrainerConfig) -> MegatronOptions:
        """Raises UnsupportedError for an unknown option and for settings this trainer can't honour."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(config.options) - known)
        if unknown:
            raise UnsupportedError(
                f"options of the megatron trainer: unknown {unknown}; known: {', '.join(sorted(known))}"
            )
        options = cls(**config.options)
        for name in ("tp", "pp", "dp"):
            if getattr(options, name) < 1:
                raise UnsupportedError(f"{name} = {getattr(options, name)}: must be at least 1")
        if config.autocast:
            raise UnsupportedError("autocast: the megatron trainer uses dtype = 'bfloat16' (with float32 main weights)")
        if config.bounded_memory:
            raise UnsupportedError("bounded_memory: use options.recompute = 'full' with the megatron trainer")
        if config.dtype not in DTYPES:
            raise UnsupportedError(f"dtype = {config.dtype!r}: expected one of {', '.join(DTYPES)}")
        return options


class MegatronTrainer(RankedTrainer):
    """See `gyre_backend.trainers.base.Trainer`. Call `close()` at the end, or use it as a context manager."""

    def __init__(self, model_dir: Path, config: TrainerConfig, algorithm: Algorithm) -> None:
        """Starts tp * pp * dp processes and loads the model into them.

        Raises UnsupportedError, before anything is started, for a model or setting that can't be exact.
        """
        from transformers import AutoConfig

        options = MegatronOptions.of(config)
        hf = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        megatron_layout.refuse(hf, tp=options.tp, pp=options.pp)
        if importlib.util.find_spec("megatron") is None:
            raise MissingExtraError("megatron-core", "megatron")
        shape = megatron_layout.Shape.of(hf)
        ref_shape = None
        if config.ref_model:
            ref = AutoConfig.from_pretrained(config.ref_model, local_files_only=True)
            megatron_layout.refuse(ref, tp=options.tp, pp=options.pp)
            ref_shape = megatron_layout.Shape.of(ref)
            if megatron_weights.hf_shapes(ref_shape) != megatron_weights.hf_shapes(shape):
                raise UnsupportedError(f"ref_model = {config.ref_model}: its tensors are not shaped as the policy's")
        recompute = options.recompute
        if config.gradient_checkpointing and recompute == "none":
            recompute = "full"
        setup = Setup(
            model_dir=str(model_dir),
            shape=shape,
            ref_shape=ref_shape,
            tp=options.tp,
            pp=options.pp,
            dp=options.dp,
            recompute=recompute,
            distributed_optimizer=options.distributed_optimizer,
            config=config,
            algorithm=algorithm,
        )
        shapes = megatron_weights.hf_shapes(shape)
        layout = {"tp": options.tp, "pp": options.pp, "dp": options.dp}
        super().__init__(
            model_dir,
            config,
            algorithm,
            hf=hf,
            replica="gyre_backend.trainers.megatron_replica:Replica",
            setup=setup,
            shapes=shapes,
            # megatron-core numbers ranks with tensor parallelism fastest, then data, then pipeline
            replica_of=tuple((rank // options.tp) % options.dp for rank in range(options.world)),
            micro_batches=options.micro_batches or options.pp,
            cost=megatron_layout.cost_model(shape, shapes),
            layout={**layout, "distributed_optimizer": options.distributed_optimizer},
        )

    def export_hf(self, path: Path) -> None:
        """Write a folder that an engine or transformers can load: bitwise the ranks' weights."""
        from safetensors.torch import save_file

        with new_folder(Path(path)) as folder:
            tensors = {buffer.name: buffer.tensor for buffer in self.named_weights()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            copy_companions(self._model_dir, folder)
