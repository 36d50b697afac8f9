"""The FSDP trainer: a transformers model sharded over ranks (FSDP2), each computing its part of a plan.

The same model, losses, names and exactness as the hf trainer; memory of weights, gradients and optimizer
state is divided by the number of ranks. What drives the ranks is `ranked.RankedTrainer`.
"""

from __future__ import annotations

from pathlib import Path

from gyre_backend.algorithms.batch import Algorithm
from gyre_backend.errors import UnsupportedError
from gyre_backend.trainers import hf_model
from gyre_backend.trainers.base import TrainerConfig
from gyre_backend.trainers.files import copy_companions, new_folder
from gyre_backend.trainers.fsdp_replica import Setup
from gyre_backend.trainers.ranked import DTYPES, RankedTrainer
from gyre_backend.trainers.skeleton import skeleton
from gyre_backend.tree.cost import CostModel


class FSDPTrainer(RankedTrainer):
    """See `gyre_backend.trainers.base.Trainer`. Call `close()` at the end, or use it as a context manager."""

    def __init__(self, model_dir: Path, config: TrainerConfig, algorithm: Algorithm) -> None:
        """Starts `options.ranks` processes (2 by default) and loads the model into them.

        Raises UnsupportedError for a model or setting that can't be exact.
        """
        from transformers import AutoConfig

        ranks = int(config.options.get("ranks", 2))
        unknown = sorted(set(config.options) - {"ranks"})
        if unknown or ranks < 1:
            raise UnsupportedError(
                f"trainer.options of the fsdp trainer: wanted ranks >= 1, got {dict(config.options)}"
            )
        if config.bounded_memory:
            raise UnsupportedError("bounded_memory: use gradient_checkpointing with the fsdp trainer")
        if config.dtype not in DTYPES:
            raise UnsupportedError(f"trainer.dtype = {config.dtype!r}: wanted {', '.join(DTYPES)}")
        hf = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        hf_model.refuse(hf)
        empty = skeleton(hf, DTYPES[config.dtype])
        super().__init__(
            model_dir,
            config,
            algorithm,
            hf=hf,
            replica="gyre_backend.trainers.fsdp_replica:Replica",
            setup=Setup(str(model_dir), config, algorithm),
            shapes={name: tuple(p.shape) for name, p in empty.named_parameters()},
            replica_of=tuple(range(ranks)),
            micro_batches=1,
            cost=CostModel.of_model(empty),
            layout={"ranks": ranks},
        )

    def export_hf(self, path: Path) -> None:
        """Write a folder that an engine or transformers can load: bitwise the ranks' weights."""
        with new_folder(Path(path)) as folder:
            self.model.save_pretrained(folder)
            copy_companions(self._model_dir, folder)
