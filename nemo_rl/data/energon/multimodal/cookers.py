"""The cookers that come with the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.data.conversation import Conversation, ConversationFields, to_conversation
from nemo_rl.data.energon.multimodal.registry import COOKER_REGISTRY
from nemo_rl.data.energon.multimodal.types import Cook
from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from nemo_rl.data.energon.config import EnergonCookerConfig


def generic_conversation(**options: str | None) -> Cook:
    """Rows with `messages`, or with a question and an answer. The options are those of `ConversationFields`."""
    fields = ConversationFields(**options)

    def cook(row: Mapping[str, Any]) -> Conversation:
        return to_conversation(row, fields)

    return cook


def select_cooker(cookers: Sequence[EnergonCookerConfig], subflavors: Mapping[str, Any]) -> Cook:
    """The cooker of a source: the first whose filter fits the source's subflavors, else the one without a filter.

    Raises:
        UserError: more than one cooker without a filter, one that isn't last, equal filters, or no cooker that fits.
    """
    filters = [cooker.has_subflavors for cooker in cookers]
    if None in filters[:-1]:
        raise UserError("data.energon.cookers: only the last cooker may come without has_subflavors")
    if any(one in filters[:place] for place, one in enumerate(filters)):
        raise UserError("data.energon.cookers: two cookers have the same has_subflavors")
    for cooker in cookers:
        wanted = cooker.has_subflavors or {}
        if all(subflavors.get(name) == value for name, value in wanted.items()):
            return COOKER_REGISTRY.build(cooker)
    raise UserError(f"data.energon.cookers: none takes rows with the subflavors {dict(subflavors)}")
