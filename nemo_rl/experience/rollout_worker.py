"""The rollout process: prompts in, rows in the data plane out, weights exchanged in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.prompts import PromptDataConfig, PromptDataset
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.environments.config import build_environment
from nemo_rl.environments.interfaces import Environment
from nemo_rl.environments.rewards import load_function
from nemo_rl.experience.config import RolloutWorkerConfig
from nemo_rl.experience.group_writer import clear_groups, write_groups
from nemo_rl.experience.interfaces import (
    GroupOrder,
    GroupResult,
    RolloutStatus,
    RolloutWorkerInfo,
    SampledAnswer,
    SampleStats,
)
from nemo_rl.experience.rollout_log import RolloutLog
from nemo_rl.experience.rollout_loop import RolloutLoop
from nemo_rl.experience.rollouts import RolloutLimits, RolloutManager
from nemo_rl.experience.turns import TurnTokens, default_stop_token_ids
from nemo_rl.models.generation.factory import build_generation_engine
from nemo_rl.models.generation.interfaces import GenerationEngine, SamplingParams

log = logging.getLogger(__name__)

_CALL_LIMIT_S = 600.0  # a call waits for one step of the sampler, which on a CPU may hold a long prompt

ReadWeights = Callable[[Any], Iterable[tuple[str, Tensor]]]
"""From the references that the controller hands over to names and weights."""


class RolloutWorker:
    """Draws samples in a thread of its own; the calls below only hand over orders and fetch what is finished.

    The constructor is light; `initialize` builds everything. An exception in the thread is raised by the next call.

    Args:
        read_weights: turns the argument of `load_weights` into names and weights, called in the thread; a function or
            its dotted name, which spares the caller its imports.
        build_engine: makes the sampler; None takes what `generation.backend` names.
    """

    def __init__(
        self,
        config: RolloutWorkerConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        read_weights: ReadWeights | str,
        build_engine: Callable[[], GenerationEngine] | None = None,
    ):
        self.config = config
        self._tokenizer = tokenizer
        self._read_weights: ReadWeights = (
            load_function(read_weights, "read_weights") if isinstance(read_weights, str) else read_weights
        )
        self._build_engine = build_engine
        self._client: DataPlaneClient | None = None
        self._environment: Environment | None = None
        self._datasets: dict[str, PromptDataset] = {}
        self._loop: RolloutLoop | None = None
        self._evaluations = 0
        self._log = RolloutLog(config.rollouts_path)
        self._sampling = self._sampling_params()

    def initialize(self) -> RolloutWorkerInfo:
        """Opens the prompts, builds environment and sampler, starts the thread.

        Raises:
            UserError: data, environment or model can't be used.
        """
        logging.basicConfig(level=logging.INFO, format="%(asctime)s rollouts %(levelname)s %(message)s")
        config = self.config
        environment = self._environment = build_environment(config.env)
        self._datasets["train"] = self._open(config.data.train, environment.needs_gold, "data.train")
        if config.data.validation is not None:
            self._datasets["validation"] = self._open(config.data.validation, environment.needs_gold, "data.validation")
        engine = (self._build_engine or self._default_engine)()
        self._loop = RolloutLoop(engine, partial(self._build_manager, engine, environment))
        self._loop.start()
        train, validation = self._datasets["train"], self._datasets.get("validation")
        return RolloutWorkerInfo(
            train_prompts=len(train),
            validation_prompts=len(validation) if validation is not None else 0,
            left_out=dict(train.counts + validation.counts if validation is not None else train.counts),
            train_digest=train.digest,
        )

    def setup_data_plane(self, cfg: Any) -> None:
        """Attaches this process to the data plane; further calls change nothing."""
        if self._client is None:
            self._client = build_data_plane_client(cfg, bootstrap=False)

    def submit(self, orders: Sequence[GroupOrder]) -> None:
        """Takes orders of training prompts; returns before anything is drawn.

        Raises:
            ValueError: a group of that name is in work.
            IndexError: there is no such prompt.
        """

        def start(manager: RolloutManager) -> None:
            prompts = [self._datasets["train"].row(order.prompt_index) for order in orders]
            for order, prompt in zip(orders, prompts, strict=True):
                manager.start(order, prompt, self._sampling)

        self._running.call(start, reason=f"{len(orders)} orders", timeout_s=_CALL_LIMIT_S)

    def collect(self, max_groups: int, timeout_s: float, min_groups: int = 1) -> list[GroupResult]:
        """Up to `max_groups` finished or dropped groups, in the order of their orders, rows written.

        Waits until `min_groups` are finished, `timeout_s` seconds are over, or nothing is left in work. All rows are
        written with one put; when it fails no row is left behind and the groups can be collected again.
        """
        groups = self._running.take_finished(max_groups, min_groups, timeout_s)
        try:
            results = write_groups(self._plane, self.config.partition_id, groups)
        except BaseException:
            self._running.put_back(groups)
            raise
        self._log.add(groups)
        return results

    def abort(self, group_ids: Sequence[str]) -> None:
        """Forgets groups, in work, finished or collected, and clears their rows. Unknown ones are no error."""
        self._running.abort(group_ids, _CALL_LIMIT_S)
        clear_groups(self._plane, self.config.partition_id, group_ids)

    def load_weights(self, refs: Any, version: int, timeout_s: float = _CALL_LIMIT_S) -> int:
        """Takes new weights between two steps of the sampler; the version. Samples in work go on with them."""
        return self._running.load_weights(
            lambda engine: engine.load_weights(self._read_weights(refs), version), timeout_s
        )

    def evaluate(
        self,
        prompt_indices: Sequence[int],
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float = 3600.0,
    ) -> list[SampleStats]:
        """One sample of each of these validation prompts, or training prompts where there is no validation data.

        Nothing is written to the data plane. Samples of orders that are in work go on meanwhile. The same prompts,
        weights and seed give the same samples.

        Args:
            sampling: fields of `SamplingParams` that differ from training, such as `{"temperature": 0.0}`.

        Returns:
            One entry per prompt, in the given order, without those whose attempts all failed: they were not sampled,
            which is no reward of 0.

        Raises:
            RunError: not all are drawn within `timeout_s` seconds.
        """
        dataset = self._datasets.get("validation", self._datasets["train"])
        params = replace(self._sampling, **(sampling or {}))
        self._evaluations += 1
        orders = [
            GroupOrder(f"evaluation{self._evaluations}_{place}", index, 1, -1, None, self.config.seed + index)
            for place, index in enumerate(prompt_indices)
        ]

        def start(manager: RolloutManager) -> None:
            prompts = [dataset.row(index) for index in prompt_indices]
            for order, prompt in zip(orders, prompts, strict=True):
                manager.start(order, prompt, params, evaluation=True)

        self._running.call(start, reason="validation", timeout_s=_CALL_LIMIT_S)
        groups = self._running.take_evaluated([order.group_id for order in orders], timeout_s)
        return [group.episodes[0].stats() for group in groups if group.failure is None]

    def sample_table(self, count: int) -> list[SampledAnswer]:
        """The last `count` collected samples, at most 256, oldest first."""
        return self._log.last(count)

    def status(self) -> RolloutStatus:
        """How it goes."""
        return self._running.status()

    def shutdown(self) -> None:
        """Closes the data plane's client, ends the thread, frees sampler and environment; may be called twice."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        loop, self._loop = self._loop, None
        if loop is not None and not loop.stop():
            log.warning("the rollout thread is stuck and was left behind")
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    @property
    def _running(self) -> RolloutLoop:
        assert self._loop is not None, "initialize has not run"
        return self._loop

    @property
    def _plane(self) -> DataPlaneClient:
        assert self._client is not None, "setup_data_plane has not run"
        return self._client

    def _sampling_params(self) -> SamplingParams:
        stops = default_stop_token_ids(self._tokenizer, self.config.data.train.template)
        return self.config.generation.sampling_params(list(stops))

    def _open(self, source: PromptDataConfig, needs_gold: bool, key: str) -> PromptDataset:
        data = self.config.data
        room = self.config.max_total_sequence_length - 1
        return PromptDataset(
            source,
            self._tokenizer,
            max_prompt_length=room if data.max_prompt_length is None else min(room, data.max_prompt_length),
            needs_gold=needs_gold,
            chat_template_kwargs=data.chat_template_kwargs,
            add_bos=data.add_bos,
            key=key,
        )

    def _default_engine(self) -> GenerationEngine:
        config = self.config
        overrides = dict(config.hf_config_overrides or {})
        return build_generation_engine(
            config.generation, config.model_name, precision=config.precision, hf_config_overrides=overrides
        )

    def _build_manager(
        self, engine: GenerationEngine, environment: Environment, on_result: Callable[[], None]
    ) -> RolloutManager:
        config = self.config
        turn_tokens = TurnTokens(
            self._tokenizer,
            config.data.train.template,
            self._sampling.stop_token_ids,
            config.data.chat_template_kwargs,
        )
        limits = RolloutLimits(config.max_total_sequence_length, config.max_turns or config.env.max_turns)
        return RolloutManager(
            engine,
            environment,
            turn_tokens,
            limits,
            config.failure,
            env_workers=config.env.num_workers,
            on_result=on_result,
        )
