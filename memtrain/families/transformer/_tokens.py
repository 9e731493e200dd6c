"""From text to numbers: the tokenizer of loaded weights, or a table of words."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..._errors import MemtrainError

_WORD = re.compile(r"\w+|[^\w\s]")
#: Documents that are tokenized together: as lists of Python numbers they take much memory.
_GROUP = 64


class Words:
    """The commonest words of some texts; the others share a few numbers by their checksum.

    Number 0 fills ends and number 1 begins every text, where BERT's classifier looks. No case.

    Args:
        texts: To count words in.
        size: Most numbers there may be; an eighth of them is for words that are not common.
    """

    pad = 0
    _START, _FIRST = 1, 2

    def __init__(self, texts: Iterable[str], size: int) -> None:
        counts = Counter(word for text in texts for word in _WORD.findall(text.lower()))
        # Equally common words by their spelling, so that the order of the texts plays no part.
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self.hashed = max(1, min(size, len(ranked)) // 8)
        known = ranked[: max(0, size - self._FIRST - self.hashed)]
        self._numbers = {word: self._FIRST + i for i, word in enumerate(known)}
        self.size = self._FIRST + len(known) + self.hashed

    def encode(self, texts: Sequence[str], limit: int) -> list[np.ndarray]:
        """The numbers of each text, at most ``limit``."""
        return [self._encode(text, limit) for text in texts]

    def _encode(self, text: str, limit: int) -> np.ndarray:
        words = _WORD.findall(text.lower())[: limit - 1]
        return np.array([self._START, *map(self._number, words)], dtype=np.int32)

    def _number(self, word: str) -> int:
        known = self._numbers.get(word)
        if known is not None:
            return known
        return self.size - 1 - zlib.crc32(word.encode()) % self.hashed


class Pieces:
    """The tokenizer that belongs to loaded weights.

    Args:
        tokenizer: As transformers loads it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.size = len(tokenizer)
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad: int = next(number for number in candidates if number is not None)

    def encode(self, texts: Sequence[str], limit: int) -> list[np.ndarray]:
        """The tokens of each text with what the weights expect around them, at most ``limit``."""
        rows = self._tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
        return [np.array(row or [self.pad], dtype=np.int32) for row in rows]

    def pack(self, documents: Sequence[bytes]) -> tuple[np.ndarray, int]:
        """One stream of documents, with the token that ends a text before each of them.

        Args:
            documents: UTF-8; what is not becomes U+FFFD.

        Returns:
            (N,) int32, and the UTF-8 bytes that its tokens but the first stand for.

        Raises:
            MemtrainError: The tokenizer has no token that ends or separates texts.
        """
        t = self._tokenizer
        candidates = (t.eos_token_id, t.sep_token_id, t.bos_token_id)
        end = next((number for number in candidates if number is not None), None)
        if end is None:
            raise MemtrainError(
                f"The tokenizer {type(t).__name__} has no token that ends a text (eos_token), "
                "which documents are joined with. Set one in its tokenizer_config.json."
            )
        parts, text_bytes = [], 0
        for first in range(0, len(documents), _GROUP):
            group = documents[first : first + _GROUP]
            texts = [document.decode("utf-8", "replace") for document in group]
            rows = t(texts, add_special_tokens=False, verbose=False)["input_ids"]
            parts += [np.array([end, *row], dtype=np.int32) for row in rows]
            text_bytes += sum(len(text.encode()) for text in texts)
        return np.concatenate(parts), text_bytes
