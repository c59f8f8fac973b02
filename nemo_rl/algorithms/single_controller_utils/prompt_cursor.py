"""Which prompt is sampled next."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from nemo_rl.data.prompts import prompt_order
from nemo_rl.experience.interfaces import GroupOrder


@dataclass
class PromptCursor:
    """Each prompt once per pass, in a new order each pass; orders depend on nothing but seed and position.

    Attributes:
        num_prompts: prompts of a pass.
        num_generations: samples of each.
        max_epochs: passes.
        position: prompts handed out so far.
    """

    num_prompts: int
    num_generations: int
    seed: int
    shuffle: bool
    max_epochs: int
    position: int = 0
    _epoch: int = -1
    _order: list[int] | None = None

    @property
    def epoch(self) -> int:
        """The pass of the next prompt, from 0."""
        return self.position // self.num_prompts

    @property
    def is_exhausted(self) -> bool:
        """No prompt is left."""
        return self.epoch >= self.max_epochs

    def next(self, *, weight_version: int, target_step: int | None) -> GroupOrder:
        """The order for the next prompt. Group ids sort in the order they are handed out."""
        epoch, at = divmod(self.position, self.num_prompts)
        if self._epoch != epoch or self._order is None:
            order = prompt_order(self.num_prompts, epoch=epoch, seed=self.seed, shuffle=self.shuffle)
            self._epoch, self._order = epoch, order
        group_id = f"g{self.position:012d}"
        self.position += 1
        digest = hashlib.blake2b(f"{self.seed}/{group_id}".encode(), digest_size=7).digest()
        return GroupOrder(
            group_id=group_id,
            prompt_index=self._order[at],
            num_generations=self.num_generations,
            weight_version=weight_version,
            target_step=target_step,
            seed=int.from_bytes(digest),
        )
