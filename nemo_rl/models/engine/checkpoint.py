"""Weights and optimizer state to and from disk: safetensors written by torch DCP, the rest as JSON. No pickle.

A save first copies the tensors (training waits for that only), then writes in a thread. Any number of ranks can load
what any number of ranks saved.
"""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nemo_rl.models.engine.engine import Engine
from nemo_rl.utils.errors import RunError, UserError

log = logging.getLogger(__name__)

OPTIMIZER_JSON = "optimizer.json"


def module_weights(engine: Engine) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name. Tied weights appear once, so they stay tied."""
    module = engine.model.module
    state = {name: p.detach() for name, p in engine.model.masters.items()}
    persistent = set(module.state_dict().keys())
    return state | {name: b for name, b in module.named_buffers() if name in persistent}


def _optimizer_state(engine: Engine) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Optimizer state as tensors by `<parameter>.<entry>`, and its scalar entries by parameter."""
    assert engine.optimizer is not None
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in engine.model.masters.items():
        for entry, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                tensors[f"{name}.{entry}"] = value
            else:
                scalars.setdefault(name, {})[entry] = value.item() if isinstance(value, Tensor) else value
    return tensors, scalars


def _fill_optimizer_state(optimizer: Optimizer) -> None:
    """Gives every parameter an entry in the optimizer's state, so that a load has tensors to copy into."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], Tensor) else 0.0
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate, decay in zip(optimizer.param_groups, rates, decays, strict=True):
        group["lr"] = rate
        if "weight_decay" in group:
            group["weight_decay"] = decay


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """CPU copies that later steps do not change; sharded tensors stay sharded."""
    return {
        name: DTensor.from_local(
            value.to_local().detach().to("cpu", copy=True),
            value.device_mesh,
            value.placements,
            shape=value.shape,
            stride=value.stride(),
        )
        if isinstance(value, DTensor)
        else value.detach().to("cpu", copy=True)
        for name, value in tensors.items()
    }


def _write(tensors: dict[str, Tensor], directory: Path, group: dist.ProcessGroup) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, process_group=group)


def _read(tensors: dict[str, Tensor], directory: Path, group: dist.ProcessGroup, section: str) -> None:
    """Copies into `tensors` in place.

    Raises:
        UserError: no such directory, or its tensors are not those of this model.
    """
    if not directory.is_dir():
        raise UserError(f"checkpoint: there is no directory {directory}")
    reader = HuggingFaceStorageReader(str(directory))
    saved = reader.read_metadata().state_dict_metadata
    missing = sorted(set(tensors) - set(saved))
    extra = sorted(set(saved) - set(tensors))
    if missing or extra:
        what = f"lacks {missing[0]!r}" if missing else f"also holds {extra[0]!r}"
        raise UserError(f"checkpoint {directory} is of another model: it {what}")
    for name, tensor in tensors.items():
        entry = saved[name]
        if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.shape:
            size = tuple(getattr(entry, "size", ()))
            raise UserError(
                f"checkpoint {directory} is of another model: {name!r} is {size} there and "
                f"{tuple(tensor.shape)} in {section}.model_name"
            )
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), process_group=group)


class EngineCheckpointer:
    """Saves one engine in the background and loads it. One save at a time."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, weights_dir: Path, optimizer_dir: Path | None) -> None:
        """Copies the state and starts writing it; `wait` says when it is on disk. All ranks call it together.

        Args:
            weights_dir: gets safetensors with the float32 master weights, and the model's `config.json`.
            optimizer_dir: gets the optimizer's tensors and `optimizer.json` with its scalars and the schedule.
        """
        self.wait()
        engine = self._engine
        weights = _copy(module_weights(engine))
        optimizer = None
        if optimizer_dir is not None and engine.optimizer is not None and engine.schedule is not None:
            tensors, scalars = _optimizer_state(engine)
            document = {
                "num_steps": engine.num_steps,
                "optimizer": engine.config.optimizer.name if engine.config.optimizer else None,
                "lr": [float(group["lr"]) for group in engine.optimizer.param_groups],
                "scalars": scalars,
                "schedule": _schedule_state(engine.schedule.state_dict()),
            }
            optimizer = (_copy(tensors), document)

        def write() -> None:
            try:
                _write(weights, weights_dir, engine.mesh.save_group)
                if dist.get_rank() == 0:
                    engine.model.module.config.save_pretrained(weights_dir)
                if optimizer is not None and optimizer_dir is not None:
                    _write(optimizer[0], optimizer_dir, engine.mesh.save_group)
                    if dist.get_rank() == 0:
                        (optimizer_dir / OPTIMIZER_JSON).write_text(json.dumps(optimizer[1], indent=1))
            except BaseException as error:  # noqa: BLE001  carried to the caller of `wait`, whatever it is
                self._error = error

        self._thread = threading.Thread(target=write, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether the last save is on disk; never waits.

        Raises:
            RunError: it failed.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        self.wait()
        return True

    def wait(self, timeout_s: float = 1800.0) -> None:
        """Returns when the last save is on disk.

        Raises:
            RunError: the save failed or takes longer than `timeout_s` seconds.
        """
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RunError(f"rank {dist.get_rank()}: writing the checkpoint takes longer than {timeout_s:.0f} s")
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise RunError(f"rank {dist.get_rank()}: the checkpoint could not be written: {_cause(error)}") from error

    def load(self, weights_dir: Path, optimizer_dir: Path | None) -> None:
        """Continues from a save: weights, and with `optimizer_dir` optimizer, schedule and step count.

        Raises:
            UserError: a missing directory, or a checkpoint of another model or optimizer.
        """
        engine = self._engine
        _read(module_weights(engine), weights_dir, engine.mesh.save_group, engine.config.section)
        engine.model.publish()
        if optimizer_dir is None or engine.optimizer is None or engine.schedule is None:
            return
        path = optimizer_dir / OPTIMIZER_JSON
        if not path.is_file():
            raise UserError(f"checkpoint: {path} is missing, so the optimizer can't continue")
        document = json.loads(path.read_text())
        name = engine.config.optimizer.name if engine.config.optimizer else None
        if document["optimizer"] != name:
            raise UserError(
                f"{engine.config.section}.optimizer.name is {name!r}, but {optimizer_dir} was saved by "
                f"{document['optimizer']!r}"
            )
        if document["scalars"]:
            _fill_optimizer_state(engine.optimizer)
            tensors, _ = _optimizer_state(engine)
            _read(tensors, optimizer_dir, engine.mesh.save_group, engine.config.section)
            for parameter_name, parameter in engine.model.masters.items():
                state = engine.optimizer.state[parameter]
                for entry, value in document["scalars"].get(parameter_name, {}).items():
                    old = state.get(entry)
                    state[entry] = torch.full_like(old, value) if isinstance(old, Tensor) else value
        engine.schedule.load_state_dict(_schedule_state(document["schedule"]))
        for group, lr in zip(engine.optimizer.param_groups, document["lr"], strict=True):
            group["lr"] = lr
        engine.num_steps = document["num_steps"]


def _schedule_state(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without what JSON can't hold; nested schedulers are followed."""
    return {
        key: [_schedule_state(part) if isinstance(part, dict) else part for part in value]
        if isinstance(value, list)
        else value
        for key, value in state.items()
        if isinstance(value, (bool, int, float, str, list, type(None)))
    }


def _cause(error: BaseException) -> str:
    """The first line of what lies at the bottom of an error, with its type."""
    text = (str(error).strip().splitlines() or [""])[-1]
    return f"{type(error).__name__}: {text}"
