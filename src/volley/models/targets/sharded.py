"""Target divided over the processes of torchrun (tensor parallelism): rank 0 decides, the other ranks follow.

transformers divides the linear layers of a decoder, and with them the attention heads: every rank keeps the K/V of its own
heads. Embedding and head of the model are whole on every rank, so that a drafter can use them on rank 0 alone. Rank 0 runs the
engine. Before it uses the target it sends a command (:class:`Allocate`, :class:`Forward`, :class:`Move`, :class:`Free`), and
every rank executes it on its part.
"""

import atexit
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import count
from math import gcd
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig

from volley.config import KVDtype
from volley.errors import ConfigError, ParallelError, UnsupportedModelError
from volley.files import find_target
from volley.memory.batch import RaggedBatch, Segment
from volley.memory.device import usable_device
from volley.memory.kv_store import KVStore
from volley.memory.recurrent_pass import RecurrentPass
from volley.models.gguf.file import is_gguf
from volley.models.quantised.scheme import check_loaded, quantisation_of
from volley.models.targets.folders import check_files
from volley.models.targets.loading import load_config
from volley.models.targets.recurrent import RECURRENT_LAYERS
from volley.models.targets.taps import Taps
from volley.models.targets.target import Target, check_config, load_tokenizer, reading_target
from volley.native import TargetWeights

_PATIENCE = timedelta(days=3650)  # an idle server sends nothing
_DIVIDED = ("colwise", "rowwise")
_WHOLE = "replicated_with_grad_allreduce"  # transformers' name for a weight that every rank has
_REMEDY = "use vLLM: VOLLEY_DRAFTER=DRAFTER vllm serve MODEL --tensor-parallel-size N"


@dataclass(frozen=True, slots=True)
class Allocate:
    """Command to make a K/V store, identified by a number."""

    store: int
    kv_dtype: KVDtype
    num_slots: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Command to run the target with a K/V store, or for ``None`` with a temporary one of ``num_slots``."""

    segments: list[Segment]
    token_ids: list[int]
    store: int | None
    num_slots: int


@dataclass(frozen=True, slots=True)
class Move:
    """Command to copy K/V within a store from some slots to others."""

    store: int
    sources: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Free:
    """Command to drop a store."""

    store: int


class Order:
    """Command that says itself what another rank does; ``held`` keeps what earlier orders have made there."""

    __slots__ = ()

    def obey(self, target: "ShardedTarget", held: dict[int, Any]) -> None:
        raise NotImplementedError


Command = Allocate | Forward | Move | Free | Order


class ShardedTarget(Target):
    """Target of which this process holds one of several parts; made by :meth:`from_pretrained`."""

    is_regular = False
    _is_loaded: ClassVar[bool] = False  # in this process: the other ranks follow one target only

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Take a ``model`` that transformers has divided over all processes of the default group."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._numbers, self._dropped, self._held = count(), list[Command](), dict[int, Any]()
        self._stores: WeakKeyDictionary[KVStore, int] = WeakKeyDictionary()
        self._is_running = self._is_closed = False
        _keep_local_weights(model)
        super().__init__(model, tokenizer)
        self._check_heads()
        model.get_decoder().register_forward_pre_hook(self._check_running)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "auto",
        weights: TargetWeights = "auto",
    ) -> Self:
        """Load this rank's part of a folder or a hub name. Rank 0 returns the target.

        The other ranks do not return: they follow rank 0 to its end and then raise SystemExit. Raise ConfigError or
        UnsupportedModelError if the processes cannot divide such a model, and ParallelError if another process was lost.
        """
        path, world = find_target(path), _world()
        if ShardedTarget._is_loaded:
            raise ConfigError("the processes of torchrun hold one target; start others for another target")
        _check_machine(usable_device(device), weights)
        owns_group = not dist.is_initialized()
        with reading_target(path):
            config = _divisible_config(path, world)
            check_files(path)
            plan = DistributedConfig(tp_size=world, tp_plan={"lm_head": _WHOLE})
            model, report = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, distributed_config=plan, output_loading_info=True
            )
            check_loaded(path, config, {"mismatched_keys": (), **report})
            tokenizer = load_tokenizer(path)
        ShardedTarget._is_loaded, target = True, cls(model, tokenizer)
        if target.rank == 0:
            atexit.register(target.close, owns_group)
            return target
        target.follow()
        if owns_group:
            dist.destroy_process_group()
        raise SystemExit(0)

    def _check_heads(self) -> None:
        text = self.model.config.get_text_config()
        whole = _sizes(text)["num_key_value_heads"]
        if any(heads * self.world != whole for heads, _ in self.kv_shapes):
            raise UnsupportedModelError(
                f"transformers' plan for {type(self.model).__name__} leaves K/V heads undivided; {_REMEDY}"
            )

    # -- rank 0 --------------------------------------------------------------------------------------------------------
    def make_store(self, kv_dtype: KVDtype, num_slots: int) -> KVStore:
        number, store = next(self._numbers), super().make_store(kv_dtype, num_slots)
        with self._together():
            self._send(Allocate(number, kv_dtype, num_slots))
        self._stores[store] = number
        store.on_move.append(lambda sources, targets: self._send_move(number, sources, targets))
        finalize(store, self.order_later, Free(number))
        return store

    @contextmanager
    def ordered(self, order: Order) -> Iterator[None]:
        """Send ``order`` to the other ranks. The body is rank 0's part of the work."""
        with self._together():
            self._send(order)
            yield

    def order_later(self, command: Command) -> None:
        """Send ``command`` before the next one."""
        self._dropped.append(command)

    def _send_move(self, store: int, sources: Tensor, targets: Tensor) -> None:
        with self._together():
            self._send(Move(store, sources.tolist(), targets.tolist()))

    def forward(
        self,
        batch: RaggedBatch,
        store: KVStore,
        rows: Tensor,
        taps: Taps | None = None,
        states: RecurrentPass | None = None,
    ) -> Tensor:
        with self._together():
            self._send(Forward(batch.segments, batch.token_ids.tolist(), self._stores.get(store), store.num_slots))
            return super().forward(batch, store, rows, taps, states)

    def close(self, destroy_group: bool = False) -> None:
        """End the other ranks; the target cannot be used afterwards."""
        if self._is_closed:
            return
        with self._together():
            self._send(None)
        self._is_closed = True
        if destroy_group:
            dist.destroy_process_group()

    def _send(self, command: Command | None) -> None:
        while self._dropped:
            dist.broadcast_object_list([self._dropped.pop()], 0, self._control)
        dist.broadcast_object_list([command], 0, self._control)

    # -- the other ranks -----------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def follow(self) -> None:
        """Execute rank 0's commands until it ends.

        Signals to terminate are ignored here: rank 0 handles them, as it may still have requests to finish. Raise
        ParallelError if rank 0 was lost.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stores: dict[int, KVStore] = {}
        with self._together():
            while (command := self._receive()) is not None:
                self.obey(command, stores)

    def _receive(self) -> Command | None:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, 0, self._control)
        command: Command | None = received[0]
        return command

    def obey(self, command: Command, stores: dict[int, KVStore]) -> None:
        """Execute a command of rank 0 on this rank's part of ``stores``."""
        match command:
            case Allocate(number, kv_dtype, num_slots):
                stores[number] = super().make_store(kv_dtype, num_slots)
            case Forward(segments, token_ids, known, num_slots):
                store = super().make_store("auto", num_slots) if known is None else stores[known]
                batch = RaggedBatch(segments, torch.tensor(token_ids, device=self.device))
                super().forward(batch, store, torch.zeros(1, dtype=torch.long, device=self.device))
            case Move(number, sources, targets):
                slots = torch.tensor([sources, targets], device=self.device)
                stores[number].move(slots[0], slots[1])
            case Free(number):
                del stores[number]
            case Order():
                command.obey(self, self._held)

    # -- all ranks -----------------------------------------------------------------------------------------------------
    @contextmanager
    def _together(self) -> Iterator[None]:
        """Guard work that all ranks do. After an error in it they are out of step, and none can continue."""
        if self._is_closed:
            raise ParallelError("the processes of this target have ended or are out of step; start them again")
        self._is_running = self._is_closed = True
        try:
            yield
        except Exception as error:
            raise ParallelError(
                f"rank {self.rank} of {self.world} cannot go on ({error}); the first error of any rank says why. Start all again"
            ) from error
        finally:
            self._is_running = False
        self._is_closed = False

    def _check_running(self, *_: Any) -> None:
        if not self._is_running:
            raise ConfigError(
                "this computes with the target on rank 0 alone, which holds only a part of it; use it without tensor_parallel"
            )


def _world() -> int:
    """Return the number of processes that torchrun has started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        raise ConfigError(
            "tensor_parallel divides a target over the processes of torchrun, and there is one; start with "
            "`torchrun --nproc-per-node N -m volley.cli …`, or leave it out"
        )
    return world


def _check_machine(device: torch.device, weights: TargetWeights) -> None:
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    if device.type != kind:
        raise ConfigError(f"tensor_parallel uses this machine's {kind}, and device is {device.type}; leave device out")
    if weights not in ("auto", "bf16"):
        raise ConfigError(f"weights={weights!r} is for a target in one process; leave weights or tensor_parallel out")
    if Version(transformers.__version__) < Version("5.19"):
        raise ConfigError(f"tensor_parallel needs transformers 5.19, this is {transformers.__version__}; install it")
    if find_spec("accelerate") is None:
        raise ConfigError("tensor_parallel needs the package accelerate; install it: pip install accelerate")


def _divisible_config(path: str | Path, world: int) -> PretrainedConfig:
    """Return the config of a target whose layers are to be divided; an error if ``world`` processes cannot divide them."""
    if is_gguf(path):
        raise ConfigError(f"{path} is a GGUF file, which one process reads; give the folder that it was converted from")
    config = load_config(path)
    check_config(config)
    text: Any = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) & RECURRENT_LAYERS
    plan = {part: style for part, style in (text.base_model_tp_plan or {}).items() if part.startswith("layers.")}
    others = sorted({*plan.values()} - {*_DIVIDED, _WHOLE})
    reason = None
    if quantisation_of(config) is not None:
        reason = "its weights are quantised"
    elif "block_diffusion" in config.to_dict():
        reason = "it denoises canvases"
    elif kinds:
        reason = f"it has layers of type {', '.join(sorted(kinds))}"
    elif not plan:
        reason = "transformers has no plan for it"
    elif others:
        reason = f"transformers' plan for it has parts of type {', '.join(others)}"
    if reason is not None:
        raise UnsupportedModelError(f"{path} cannot be divided by tensor_parallel: {reason}; {_REMEDY}")
    sizes = _sizes(text)
    for name, size in sizes.items():
        if size % world:
            raise ConfigError(
                f"{world} processes cannot divide {path}: its {name} is {size}; start a number of processes that divides "
                f"{gcd(*sizes.values())}"
            )
    text.base_model_tp_plan = plan
    return config


def _sizes(text: Any) -> dict[str, int]:
    """Sizes of a model that are divided, by their names in its config."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {name: getattr(text, name, None) or text.num_attention_heads for name in names}


def _keep_local_weights(model: nn.Module) -> None:
    """Replace every weight by this rank's part as a plain tensor; passes without gradients need nothing else."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, DTensor):
                module.register_parameter(name, nn.Parameter(weight.to_local(), requires_grad=False))
