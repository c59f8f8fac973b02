"""What cookers and task encoders take and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl.data.conversation import Conversation
from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.data.tokenize import TokenizedConversation

Cook = Callable[[Mapping[str, Any]], Conversation]
"""A cooked row. Raises `UserError` (or anything else) for a row that it can't read: the row is left out and counted."""

Encode = Callable[[Conversation], "list[TokenizedConversation] | str"]
"""The row of a conversation as a list of one, or of its pieces, or the reason why it is left out. `RowRefusedError`
ends the run; any other exception leaves the row out."""


class RowRefusedError(UserError):
    """A row that must end the run instead of being left out."""


@dataclass(frozen=True)
class EncoderSettings:
    """What every task encoder is built with; its options come on top."""

    tokenizer: PreTrainedTokenizerBase
    max_sequence_length: int
    """Tokens."""
    only_unmask_final: bool = False
    overlong: Literal["truncate", "drop", "split", "fail"] = "truncate"
    add_bos: bool = False
    add_eos: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DroppedRow:
    """A row that can't be trained on. Its place goes to the next row of its shard."""

    reason: str
    """A value of `nemo_rl.data.tokenize.DropReason`."""
    where: str
    """`<file>:<line>` or the key of the sample."""
    detail: str
    fatal: bool = False
    """The run has to end here."""
