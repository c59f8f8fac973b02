"""The task encoders that come with the library."""

from __future__ import annotations

from nemo_rl.data.conversation import Conversation
from nemo_rl.data.energon.multimodal.types import Encode, EncoderSettings, RowRefusedError
from nemo_rl.data.tokenize import TokenizedConversation, fit_row, tokenize_conversation
from nemo_rl.utils.errors import UserError


def generic_sft(settings: EncoderSettings) -> Encode:
    """Chat template, mask of the assistant's tokens and the length limit, all of `nemo_rl.data.tokenize`."""

    def encode(conversation: Conversation) -> list[TokenizedConversation] | str:
        row = tokenize_conversation(
            settings.tokenizer,
            conversation.messages,
            tools=conversation.tools,
            chat_template_kwargs=settings.chat_template_kwargs,
            only_unmask_final=settings.only_unmask_final,
            add_bos=settings.add_bos,
            add_eos=settings.add_eos,
        )
        try:
            return fit_row(row, settings.max_sequence_length, policy=settings.overlong)
        except UserError as error:
            raise RowRefusedError(f"{error} (data.overlong: {settings.overlong})") from None

    return encode
