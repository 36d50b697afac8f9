"""Texts of tokens, when the run's tokenizer can be found; else their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gyre_sdk.errors import ConfigError
from gyre_sdk.graph import Node

if TYPE_CHECKING:
    from gyre_sdk.capture.tokenizer import FolderTokenizer

WINDOW = 8
"""Tokens over which one character of text may be spread."""
BROKEN = "\ufffd"


class TokenTexts:
    """Decodes tokens one by one, and runs of them."""

    def __init__(self, model_dir: Path | None) -> None:
        self._tokenizer: FolderTokenizer | None = None
        self._known: dict[int, str] = {}
        self.problem = ""
        if model_dir is None:
            self.problem = "the run does not say which model it used: tokens are shown by their numbers"
            return
        from gyre_sdk.capture.tokenizer import FolderTokenizer

        try:
            self._tokenizer = FolderTokenizer(model_dir)
        except ConfigError as error:
            self.problem = f"no tokenizer, so tokens are shown by their numbers ({error})"

    @property
    def known(self) -> bool:
        """There is a tokenizer."""
        return self._tokenizer is not None

    def text(self, ids: Sequence[int]) -> str:
        """The text of a run of tokens, special ones included."""
        if self._tokenizer is None:
            return "".join(f"⟨{number}⟩" for number in ids)
        return self._tokenizer.decode(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, so that the whole is their concatenation; a character that several tokens spell
        stands with the last of them.
        """
        pieces = [self._piece(number) for number in ids]
        at = 0
        while at < len(pieces):
            if BROKEN not in pieces[at]:
                at += 1
                continue
            at = self._mend(ids, pieces, at)
        return pieces

    def _mend(self, ids: Sequence[int], pieces: list[str], at: int) -> int:
        for end in range(at + 2, min(at + WINDOW, len(ids)) + 1):
            whole = self.text(ids[at:end])
            if BROKEN not in whole:
                pieces[at : end - 1] = [""] * (end - 1 - at)
                pieces[end - 1] = whole
                return end
        return at + 1

    def _piece(self, number: int) -> str:
        known = self._known.get(number)
        if known is None:
            known = self._spaced(number) if self._tokenizer is not None else f"⟨{number}⟩"
            self._known[number] = known
        return known

    def _spaced(self, number: int) -> str:
        """Decoders of SentencePiece families drop the blank in front of a first word: ask with a token before it."""
        before = self.text([number])
        pair, single = self.text([number, number]), before
        return pair[len(single) :] if pair.startswith(single) and len(pair) > 2 * len(single) else single


def ids_of(nodes: Sequence[Node]) -> list[int]:
    """Token ids of a run of nodes."""
    return [int(i) for i in np.concatenate([node.token_ids for node in nodes])] if nodes else []
