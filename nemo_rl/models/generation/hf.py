"""The embedded engine: a transformers model, a cache of slots, and a decode loop that refills a slot as it falls free.

A step is one forward pass in most cases. Its sequence holds the next token of each decoding slot, and behind them the
whole prompts of slots that were just filled, so that a refill costs no pass of its own. Requests with a prompt that
lies in the cache copy it.

In float32 a sample does not depend on its company beyond rounding. In bfloat16 the rounding of a matmul depends on how
many rows it has, so a draw that is close to the border between two tokens can fall on the other side.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.engine.attention import DocumentGroup
from nemo_rl.models.engine.model_config import packing_problem, read_model_config
from nemo_rl.models.engine.precision import compute_dtype
from nemo_rl.models.generation.interfaces import GenerationEngine, GenerationOutput, GenerationRequest
from nemo_rl.models.generation.sampling import draw_tokens
from nemo_rl.models.generation.slot_attention import (
    ATTENTION_NAME,
    SlotBlock,
    SlotCache,
    SlotPass,
    register_slot_attention,
)
from nemo_rl.models.generation.slots import SlotTable
from nemo_rl.models.generation.weights import copy_weights
from nemo_rl.utils.errors import UserError

log = logging.getLogger(__name__)

# Tokens of prompts in one pass: bounds the memory of its activations.
_PREFILL_TOKENS = 2048

# Tokens of prompts that stand in a pass more than once; beyond that the others wait for a pass and copy them.
_TWIN_TOKENS = 128

# Shapes are rounded up to few distinct ones: bfloat16 on the CPU compiles a kernel for each.
_LENGTH_MULTIPLE = 16
_PREFILL_MULTIPLE = 64

# Slots that attention looks at together, at least, and the most such blocks: each costs some calls per layer.
_BLOCK_SLOTS = 16
_MOST_BLOCKS = 4
_LIKE_LENGTHS = 32


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def batch_bucket(count: int, most: int) -> int:
    """The number of slots a pass computes for `count` of them: a power of two, or one and a half of one."""
    if count <= 2:
        return min(count, most)
    power = 1 << (count - 1).bit_length()
    return min(power * 3 // 4 if count <= power * 3 // 4 else power, most)


def document_length(count: int) -> int:
    """The length a prompt of `count` tokens gets in a pass: near lengths become equal and run as one group."""
    return _round_up(count, 8 if count <= 64 else 32)


def _blocks(lengths: NDArray[np.int64], room: int) -> tuple[SlotBlock, ...]:
    """Cuts slots with contexts of these lengths where much less has to be looked at on one side than on the other."""
    count = len(lengths)
    size = max(_BLOCK_SLOTS, _round_up(count, _MOST_BLOCKS) // _MOST_BLOCKS)
    blocks: list[SlotBlock] = []
    for start in range(0, count, size):
        end = min(start + size, count)
        length = min(_round_up(int(lengths[start:end].max()), _LENGTH_MULTIPLE), room)
        if blocks and abs(blocks[-1].length - length) <= _LIKE_LENGTHS:
            last = blocks.pop()
            start, length = last.start, max(last.length, length)
        blocks.append(SlotBlock(start, end, length))
    return tuple(blocks)


@dataclass(frozen=True)
class _Pass:
    """Arguments of a forward pass, and the slots that draw from it.

    Attributes:
        heads: position in the sequence from which each of the first slots draws, `[B]`; 0 where it does not.
        drawing: slots that draw, ascending.
    """

    input_ids: Tensor
    position_ids: Tensor
    heads: Tensor
    slot_pass: SlotPass
    drawing: NDArray[np.int64]


class HFGenerationEngine(GenerationEngine):
    """Samples from any causal language model of transformers whose tokens mix in its attention function only.

    Args:
        model_name: local directory or hub name.
        precision: `auto`, `bfloat16` or `float32`.
        max_slots: samples decoded together.
        max_model_len: longest prompt with its answer, in tokens; None takes the model's `max_position_embeddings`.
        hf_config_overrides: fields of the model's config to replace.
        device: None takes the GPU that this process sees, else the CPU.

    Raises:
        UserError: the model can't be loaded, or can't be sampled.
    """

    def __init__(
        self,
        model_name: str,
        *,
        precision: str = "auto",
        max_slots: int = 64,
        max_model_len: int | None = None,
        hf_config_overrides: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ):
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.device = device
        self._model = _load(model_name, hf_config_overrides, compute_dtype(precision, device), device)
        text_config = self._model.config.get_text_config()
        limit = getattr(text_config, "max_position_embeddings", None)
        self.max_model_len: int | None = max_model_len or limit
        self._num_layers = int(text_config.num_hidden_layers)
        self._table = SlotTable(max_slots, _LENGTH_MULTIPLE)
        self._cache = SlotCache(max_slots, _LENGTH_MULTIPLE)
        self._queue: deque[GenerationRequest] = deque()
        self._filling: deque[int] = deque()
        self._prompts = _PromptIndex(max_slots)
        self._ids: set[str] = set()
        self._version = -1
        self.num_passes = 0

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            length = len(request.prompt_ids)
            if not length:
                raise ValueError(f"{request.request_id}: an empty prompt")
            if self.max_model_len is not None and length >= self.max_model_len:
                raise ValueError(
                    f"{request.request_id}: a prompt of {length} tokens leaves no room for an answer in max_model_len "
                    f"{self.max_model_len}"
                )
            if request.request_id in self._ids:
                raise ValueError(f"{request.request_id} is in work already")
            self._ids.add(request.request_id)
            self._queue.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        dropped = set(request_ids) & self._ids
        self._ids -= dropped
        self._queue = deque(request for request in self._queue if request.request_id not in dropped)
        for slot in self._table.used_slots():
            request = self._table.requests[slot]
            if request is not None and request.request_id in dropped:
                self._table.free(slot)
        self._filling = deque(slot for slot in self._filling if self._table.requests[slot] is not None)

    @property
    def num_unfinished(self) -> int:
        return len(self._ids)

    @property
    def version(self) -> int:
        return self._version

    # -- weights ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies weights in place; names are those of the model's parameters and persistent buffers.

        Samples in work are computed again from their prompt on before they go on. After an error the weights are a
        mixture of old and new.

        Raises:
            ValueError: an unknown name, another shape, or a weight that is missing.
        """
        copy_weights(self._model, weights)
        self._version = version
        self._prompts.clear()
        self._cache.clear()
        self._table.cached[:] = False
        self._filling = deque(self._table.used_slots())

    # -- sampling -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[GenerationOutput]:
        """One token for every sample in work, in one pass unless there are more new prompts than a pass takes."""
        self._admit()
        outputs: list[GenerationOutput] = []
        while True:
            documents = self._fill()
            decoding = np.flatnonzero(self._table.cached) if not self._filling else np.zeros(0, np.int64)
            if documents or len(decoding):
                try:
                    outputs += self._run(self._plan(decoding, documents))
                except BaseException:
                    self._filling.extendleft(documents)
                    raise
            if not self._filling:
                return outputs

    def close(self) -> None:
        self._table = SlotTable(self._table.num_slots, _LENGTH_MULTIPLE)
        self._cache = SlotCache(self._table.num_slots, _LENGTH_MULTIPLE)
        self._queue.clear()
        self._filling.clear()
        self._ids.clear()

    def _admit(self) -> None:
        """Gives free slots to queued requests, or, when there are none, moves the samples together."""
        if self._queue:
            free = self._table.free_slots()
            requests = [self._queue.popleft() for _ in range(min(len(free), len(self._queue)))]
            # Slots with contexts of like length stand side by side, so that attention can go through them in blocks.
            requests.sort(key=lambda request: len(request.prompt_ids))
            for slot, request in zip(free, requests, strict=False):
                limit = len(request.prompt_ids) + request.sampling.max_new_tokens
                if self.max_model_len is not None:
                    limit = min(limit, self.max_model_len)
                if limit > self._table.room:
                    room = _round_up(limit, _LENGTH_MULTIPLE)
                    self._table.grow(room)
                    self._cache.grow(room)
                self._table.put(slot, request, limit)
                self._filling.append(slot)
        elif not self._filling:
            self._move_together()

    def _move_together(self) -> None:
        """Moves the last samples to free slots in front where a pass gets smaller by it."""
        used = self._table.used_slots()
        most = self._table.num_slots
        if not used or batch_bucket(len(used), most) == batch_bucket(used[-1] + 1, most):
            return
        targets = [slot for slot in self._table.free_slots() if slot < len(used)]
        sources = [slot for slot in used if slot >= len(used)]
        self._cache.copy(sources, targets, int(self._table.lengths[sources].max()) - 1)
        for source, target in zip(sources, targets, strict=True):
            self._prompts.forget(target)
            self._table.move(source, target)

    def _fill(self) -> list[int]:
        """Slots whose context goes through the next pass.

        Others stay in `_filling`: there is no room in the pass, or their prompt is in it already, so that they can
        copy it afterwards, unless that would save too little for a pass of its own. A slot whose prompt is in the cache
        copies it and decodes.
        """
        documents: list[int] = []
        copies: dict[int, int] = {}
        later: list[int] = []
        twins: list[int] = []
        on_the_way: set[bytes] = set()
        tokens = 0
        for slot in self._filling:
            length = int(self._table.lengths[slot])
            context = self._table.context(slot)
            source = self._prompts.find(context, slot)
            if source is not None:
                copies[slot] = source
            elif context in on_the_way:
                twins.append(slot)
            elif documents and tokens + document_length(length) > _PREFILL_TOKENS:
                later.append(slot)
            else:
                documents.append(slot)
                on_the_way.add(context)
                tokens += document_length(length)
        if not later and sum(self._table.lengths[twins]) <= _TWIN_TOKENS:
            documents += twins
            twins = []
        self._filling = deque(later + twins)
        self._copy_prompts(copies)
        return documents

    def _copy_prompts(self, copies: dict[int, int]) -> None:
        """Gives slots the prompt that another one holds; `copies` maps the one to the other, or a slot to itself."""
        if not copies:
            return
        self._cache.copy(list(copies.values()), list(copies), int(self._table.lengths[list(copies)].max()) - 1)
        for slot in copies:
            self._prompts.put(slot, self._table.context(slot))
            self._table.cached[slot] = True

    def _plan(self, decoding: NDArray[np.int64], documents: list[int]) -> _Pass:
        """The pass that decodes a token of some slots and computes the contexts of others."""
        table, room, most = self._table, self._table.room, self._table.num_slots
        lengths = table.lengths
        count = batch_bucket(int(decoding[-1]) + 1, most) if len(decoding) else 0
        drawing = np.sort(np.concatenate([decoding, np.asarray(documents, np.int64)]))
        heads = np.zeros(batch_bucket(int(drawing[-1]) + 1, most), np.int64)
        documents = sorted(documents, key=lambda slot: lengths[slot])
        padded = [document_length(int(lengths[slot])) for slot in documents]
        total = count + _round_up(sum(padded), _PREFILL_MULTIPLE)
        input_ids, position_ids = np.zeros(total, np.int64), np.zeros(total, np.int64)
        slots = np.full(total, most)  # the slot that nobody reads
        if count:
            position_ids[decoding] = lengths[decoding] - 1
            input_ids[decoding] = table.tokens[decoding, position_ids[decoding]]
            slots[decoding] = decoding
            heads[decoding] = decoding
        blocks = _blocks(position_ids[:count] + 1, room)
        groups, at = [], count
        for length, members in groupby(zip(documents, padded, strict=True), key=lambda pair: pair[1]):
            start = at
            for slot, _ in members:
                used = int(lengths[slot])
                input_ids[at : at + used] = table.tokens[slot, :used]
                position_ids[at : at + used] = np.arange(used)
                slots[at : at + used] = slot
                heads[slot] = at + used - 1
                at += length
            groups.append(DocumentGroup(start - count, at - count, (at - start) // length))
        positions = self._tensor(position_ids)
        return _Pass(
            input_ids=self._tensor(input_ids)[None],
            position_ids=positions[None],
            heads=self._tensor(heads),
            slot_pass=SlotPass(
                cache=self._cache,
                slots=self._tensor(slots),
                positions=positions,
                blocks=blocks,
                documents=tuple(groups),
            ),
            drawing=drawing,
        )

    def _run(self, plan: _Pass) -> list[GenerationOutput]:
        """Runs the pass, draws a token for each of its slots; the samples that are finished by it."""
        logits = self._model(
            input_ids=plan.input_ids,
            position_ids=plan.position_ids,
            use_cache=False,
            logits_to_keep=plan.heads,
            slot_pass=plan.slot_pass,
        ).logits[0]
        self.num_passes += 1
        if self._cache.num_layers != self._num_layers:
            raise UserError(
                f"generation.backend: hf can't sample from {self._model.config.model_type}: "
                f"{self._cache.num_layers} of its {self._num_layers} layers use transformers' attention functions"
            )
        table, slots = self._table, plan.drawing
        for slot in slots[~table.cached[slots]].tolist():
            self._prompts.put(slot, table.context(slot))
        table.cached[slots] = True
        tokens, logprobs = draw_tokens(logits, table.sampling_rows(len(plan.heads)))
        drawn = table.extend(slots, tokens.cpu().numpy()[slots], logprobs.cpu().numpy()[slots], self._version)
        outputs = []
        for slot, reason in drawn:
            output = table.output(slot, reason, self._version)
            outputs.append(output)
            self._ids.discard(output.request_id)
            table.free(slot)
            if reason == "error":
                # What is not finite would spread to the slot's next sample: masked positions are multiplied by zero.
                self._cache.clear([slot])
                self._prompts.forget(slot)
        return outputs

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class _PromptIndex:
    """Which slots hold the keys and values of which prompt. A freed slot keeps them until it gets another sample."""

    def __init__(self, num_slots: int):
        self._context: list[bytes | None] = [None] * num_slots
        self._slots: dict[bytes, set[int]] = {}

    def find(self, context: bytes, slot: int) -> int | None:
        """A slot that holds `context`, `slot` itself if it does."""
        slots = self._slots.get(context)
        if not slots:
            return None
        return slot if slot in slots else next(iter(slots))

    def put(self, slot: int, context: bytes) -> None:
        """The slot holds `context`, or will after the next pass."""
        self.forget(slot)
        self._context[slot] = context
        self._slots.setdefault(context, set()).add(slot)

    def forget(self, slot: int) -> None:
        """The slot gets something else."""
        context = self._context[slot]
        if context is None:
            return
        self._context[slot] = None
        self._slots[context].discard(slot)
        if not self._slots[context]:
            del self._slots[context]

    def clear(self) -> None:
        """No slot holds anything."""
        self._context = [None] * len(self._context)
        self._slots.clear()


def _load(
    model_name: str, overrides: dict[str, Any] | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    config = read_model_config(model_name, overrides)
    problem = packing_problem(config)
    if problem:
        raise UserError(f"generation.backend: hf can't sample from {model_name}: {problem}")
    register_slot_attention()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_name, config=config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"policy.model_name: {model_name}: {first_line}") from error
    # The trainer computes with every parameter in the compute dtype, those that a model would keep in float32 included.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)
    nn.Module.to(model, device)
    return model.eval()
