"""Log probabilities of tokens: what is asked for, and the tensors that answer it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twellc.generation.sampling import Logprob, Logprobs

# vLLM's: log probabilities or logits, of what the model computes or of what a token is chosen from.
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
MODES = (RAW, PROCESSED, "raw_logits", "processed_logits")
# Logits of a prompt that are there at once at most: 256 MiB in float32.
_MOST_LOGITS = 1 << 26


@dataclass(frozen=True)
class Wanted:
    """Which log probabilities are asked for.

    Attributes:
        answer: How many of the likeliest tokens beside the chosen one; -1 for all, None for nothing at all.
        prompt: Likewise, of each token of a prompt but the first.
        mode: One of `MODES`. No processor sees a prompt: of it the mode says log probabilities or logits alone.
        copies: Rows behind one another that have the same prompt: it is looked at in the first of them.
    """

    answer: int | None = None
    prompt: int | None = None
    mode: str = RAW
    copies: int = 1

    @property
    def processed(self) -> bool:
        """Whether an answer's are of the scores behind the processors."""
        return self.answer is not None and self.mode.startswith("processed")

    def chunk(self, rows: int, vocabulary: int, most: int) -> int:
        """Return how many tokens of each row are computed at once, `most` at most."""
        return most if self.prompt is None else max(1, min(most, _MOST_LOGITS // (rows * vocabulary)))

    def table(self, logits: Tensor, tokens: Tensor, count: int) -> Table:
        """Look up tokens and the likeliest ones.

        Args:
            logits: [rows, vocabulary].
            tokens: int64 [rows].
            count: How many of the likeliest; -1 for all.
        """
        scores = logits.float()
        scores = scores if self.mode.endswith("logits") else scores.log_softmax(-1)
        own = scores.gather(-1, tokens[:, None])
        likely = scores.topk(scores.shape[-1] if count < 0 else min(count, scores.shape[-1]))
        return Table(
            torch.cat([tokens[:, None], likely.indices], dim=-1),
            torch.cat([own, likely.values], dim=-1),
            (scores >= own).sum(-1),
        )


@dataclass(frozen=True)
class Table:
    """Tokens and what is known of them.

    Attributes:
        tokens: int64 [rows, 1 + count]: the one that was looked up, and the likeliest.
        values: Their log probabilities, float32, likewise.
        ranks: int64 [rows]: how many tokens are as likely as the one that was looked up, or likelier.
    """

    tokens: Tensor
    values: Tensor
    ranks: Tensor

    def on_host(self) -> Table:
        """Begin to copy it to the host."""
        return Table(*(each.to("cpu", non_blocking=True) for each in (self.tokens, self.values, self.ranks)))

    def rows(self) -> list[Logprobs]:
        """Return it row by row, as vLLM has it: the token first, then the likeliest in their order."""
        columns = self.tokens.tolist(), self.values.tolist(), self.ranks.tolist()
        found = []
        for tokens, values, rank in zip(*columns, strict=True):
            ranks = [rank, *range(1, len(tokens))]
            found.append({token: Logprob(*each) for token, *each in zip(tokens, values, ranks, strict=True)})
        return found
