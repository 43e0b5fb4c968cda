"""The interface of all renderers."""

from collections.abc import Sequence
from typing import Protocol

from app.environment.protocol import Message, Reply, Tool

Tools = Sequence[Tool]


class Renderer(Protocol):
    """Messages as the tokens of a chat template, or of plain text, and replies as text."""

    @property
    def tool_syntax(self) -> str | None:
        """Name of the syntax of tool calls; None where there are no tools."""
        ...

    def opening(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the tokens of a conversation, up to the policy's reply.

        Raises:
            ValueError: The template has no place for such messages or tools.
        """
        ...

    def following(
        self, token_ids: Sequence[int], messages: Sequence[Message], tools: Tools | None = None
    ) -> list[int] | None:
        """Return the tokens to append to a sequence so that `messages` follow and the policy replies next.

        Args:
            token_ids: [L] The sequence; it ends with a reply, whose last token may or may not be a stop token. A reply
                without one is closed here.
            messages: The new messages alone.
            tools: The tools that the sequence was opened with.

        Returns:
            None if the template would rewrite the sequence: an assistant message among the new ones, or earlier
            reasoning that a new user message strips.
        """
        ...

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Tools | None = None) -> Reply:
        """Parse a reply; never fails on what was sampled. The caller sets `truncated`.

        Args:
            token_ids: [N] The sampled tokens.
            prompt_ids: [L] The sequence before them: it may have opened the reasoning.
            tools: The declared tools: their schemas say which XML arguments are strings.
        """
        ...

    def read(self, token_ids: Sequence[int]) -> list[Message]:
        """Return the messages in rendered tokens, without an empty one for the next reply.

        Args:
            token_ids: [N] An opening, or what was appended to a sequence, as a client of its own rendered it.
        """
        ...

    def shorten(self, text: str, max_tokens: int) -> str:
        """Return `text` in at most `max_tokens` tokens: cut in the middle, with a note about it."""
        ...
