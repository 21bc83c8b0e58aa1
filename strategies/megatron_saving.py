"""What Megatron's strategy does with states: weights and optimizers in our checkpoints; Megatron's own when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from . import megatron_random
from . import megatron_state as states
from .checkpoint.gathering import save_gathered
from .checkpoint.sharded import open_parts
from .contents import is_extra
from .megatron_state_parts import Stored, Whole
from .optimizer import unwrap_optimizer
from .process_group import ProcessGroupStrategy

# Megatron's ways of saving in which a checkpoint goes to other arrangements of ranks.
_NATIVE = {"non_homogeneous_layers": True, "singleton_local_shards": False,
           "distrib_optim_sharding_type": "fully_reshardable"}  # fmt: skip


class MegatronState(ProcessGroupStrategy):
    """A strategy each of whose ranks has a part of Megatron's models and optimizers."""

    reads_parts = True
    _engines: list[Any]
    plugin: Any

    def engine_of(self, model: Any) -> Any:
        """Returns the engine of a prepared model, or None."""
        raise NotImplementedError

    def unwrap(self, model: Any, *, keep_compiled: bool = False) -> torch.nn.Module:
        """Returns the user's module; of Accelerate's MegatronEngine, the model in it."""
        loop = import_module(".megatron_loop", __package__).MegatronEngine
        return super().unwrap(model.module if isinstance(model, loop) else model, keep_compiled=keep_compiled)

    def state_dict(self, model: Any, *, full: bool = True) -> dict[str, Any]:
        """Returns whole weights in the model's own precision, on the first rank only: others get an empty dict.

        They have the names that the module would have on one process. With `full=False` they are this rank's Pieces.
        """
        engine = self.engine_of(model)
        if engine is None:
            return super().state_dict(model, full=full)
        found = states.parts(self.unwrap(model), engine, master=False)
        return states.gathered(found, self.world) if full else found

    def weights(self, model: Any) -> dict[str, Any]:
        """This rank's parts of the float32 weights that the optimizer trains."""
        engine = self.engine_of(model)
        return super().weights(model) if engine is None else states.parts(self.unwrap(model), engine, master=True)

    def load_state_dict(self, model: Any, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Loads whole weights, of which every rank has all, under the names that `state_dict` gives them."""
        engine = self.engine_of(model)
        if engine is None:
            return super().load_state_dict(model, state, strict=strict)
        tensors = {name: value for name, value in state.items() if not is_extra(name, value)}
        return states.load_weights(self.unwrap(model), engine, Whole(tensors), world=self.world, strict=strict)

    def save_weights(self, writer: Any, state: dict[str, Any], *, stem: str, **options: Any) -> None:
        states.save_weights(writer, state, stem=stem)

    def save_model(self, writer: Any, model: Any, **options: Any) -> None:
        """Writes whole weights, gathered one after the other."""
        engine = self.engine_of(model)
        if engine is None:
            super().save_model(writer, model, **options)
            return
        state = states.complete(states.parts(self.unwrap(model), engine, master=False), self.world)
        tensors = {name: value for name, value in state.items() if value is not None and not is_extra(name, value)}
        save_gathered(writer, tensors, lambda value: states.whole(value, self.world), **options)
        extra = {name: value for name, value in state.items() if name not in tensors}
        if extra and writer.world.rank == 0:
            writer.state("model-extra", extra)

    def load_weights(self, checkpoint: Any, model: Any, *, stem: str, strict: bool = True) -> Any:
        engine = self.engine_of(model)
        if engine is None:
            return super().load_weights(checkpoint, model, stem=stem, strict=strict)
        source = Stored(open_parts(checkpoint, stem=stem))
        return states.load_weights(self.unwrap(model), engine, source, world=self.world, strict=strict)

    def save_optimizer(self, writer: Any, optimizer: Any, names: Mapping[int, str], *, stem: str) -> None:
        engine = self._of_optimizer(optimizer)
        prefix, without = states.prefix_of(names, engine), bool(self.plugin.no_save_optim)
        states.save_optimizer(writer, engine, prefix, stem=stem, without=without)

    def load_optimizer(self, checkpoint: Any, optimizer: Any, names: Mapping[int, str], *, stem: str) -> None:
        if self.plugin.no_load_optim:
            return
        engine = self._of_optimizer(optimizer)
        states.load_optimizer(checkpoint, engine, states.prefix_of(names, engine), stem=stem, world=self.world)

    def access(self, engine: Any) -> tuple[Callable[[], dict[str, Any]], Callable[[Mapping[str, Any]], None]]:
        """Returns what gathers the whole state of an engine's optimizer, and what loads it again (collective)."""
        return (
            lambda: states.whole_optimizer(engine, self.world),
            lambda saved: states.load_whole_optimizer(engine, saved, self.world),
        )

    def save(self, writer: Any, contents: Any, **options: Any) -> None:
        super().save(writer, contents, **options)
        if not options.get("weights_only"):
            megatron_random.save(writer, self.world)

    def load(self, checkpoint: Any, contents: Any, **options: Any) -> dict[str, Any]:
        extra = super().load(checkpoint, contents, **options)
        if not options.get("weights_only"):
            megatron_random.load(checkpoint, self.world)
        return extra

    def save_native(self, model: Any, directory: str) -> None:
        """Writes Megatron's own checkpoint of a model and its optimizer, with pickles, into a new folder."""
        if self.world.rank == 0:
            Path(directory).mkdir(parents=True)
        self.world.barrier("save_native")
        import_module("megatron.core.dist_checkpointing").save(self._native(model), directory)

    def load_native(self, model: Any, directory: str) -> None:
        """Reads Megatron's own checkpoint, which runs what its pickles say: only for files that you trust."""
        engine = self._engine(model)
        wanted = self._native(model, loading=True)
        found = import_module("megatron.core.dist_checkpointing").load(wanted, directory)
        for index, chunk in enumerate(engine.model.chunks):
            chunk.load_state_dict(found[f"model{index}"])
        if engine.optimizer is not None:
            engine.optimizer.load_state_dict(found["optimizer"])

    def _native(self, model: Any, *, loading: bool = False) -> dict[str, Any]:
        engine = self._engine(model)
        state: dict[str, Any] = {
            f"model{index}": chunk.sharded_state_dict(metadata=dict(_NATIVE))
            for index, chunk in enumerate(engine.model.chunks)
        }
        if engine.optimizer is not None:
            optimizer = engine.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=dict(_NATIVE))
            state["optimizer"] = optimizer
        return state

    def _engine(self, model: Any) -> Any:
        engine = self.engine_of(model)
        if engine is None:
            raise ValueError(
                f"Expected a model that Megatron has prepared. Received: {type(model).__name__}. Pass what prepare() "
                "returned."
            )
        return engine

    def _of_optimizer(self, optimizer: Any) -> Any:
        given = unwrap_optimizer(optimizer)
        return next(engine for engine in self._engines if engine.given is given)
