"""Greedy answers to many prompts at once, with a cache, through any causal model of Transformers.

Sequences that have ended leave the batch (in steps, so that the cache is not copied for each one): the others go on
with fewer rows. Which rows are in a batch depends only on the tokens, so wirings that give the same bits make
the same batches.

`answer_from_drafts` is for answers that are probably known: a model reads what another one wrote, all tokens at once,
and goes on by itself from the first token that it would have chosen otherwise. What comes out is its own greedy answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# The batch is made smaller when this many of its rows have ended.
_ENDED_SHARE = 0.25


@torch.no_grad()
def answer(
    model: Any,
    ids_BS: Tensor,
    mask_BS: Tensor,
    *,
    end_ids: Sequence[int],
    most: int,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The tokens that the model adds to each prompt, up to and without the one that ends it, at most `most`.

    Prompts are padded on the left. `on_token(row, token)` is called for every token as it is chosen.
    """
    from transformers import DynamicCache

    written: list[list[int]] = [[] for _ in range(ids_BS.shape[0])]
    rows = list(range(ids_BS.shape[0]))  # which prompt each row of the batch belongs to
    ended: set[int] = set()
    cache = DynamicCache()
    positions = (mask_BS.cumsum(1) - 1).clamp(min=0)
    tokens = ids_BS
    for _ in range(most):
        out = model(
            input_ids=tokens,
            attention_mask=mask_BS,
            position_ids=positions[:, -tokens.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        chosen = out.logits[:, -1].argmax(-1)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row in ended:
                continue
            if token in end_ids:
                ended.add(row)
                continue
            written[row].append(token)
            if on_token is not None:
                on_token(row, token)
        alive = [place for place, row in enumerate(rows) if row not in ended]
        if not alive:
            break
        if len(rows) - len(alive) >= max(1.0, _ENDED_SHARE * len(rows)):
            keep = torch.tensor(alive, device=tokens.device)
            cache.batch_select_indices(keep)
            rows = [rows[place] for place in alive]
            chosen, mask_BS, positions = chosen[keep], mask_BS[keep], positions[keep]
        tokens = chosen[:, None]
        mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(rows), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return written


def pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask of sequences of different lengths, all ending in the same column.

    >>> ids, mask = pad_left([[5, 6, 7], [8]], 0, torch.device("cpu"))
    >>> ids.tolist(), mask.tolist()
    ([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]])
    """
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@torch.no_grad()
def read(
    model: Any,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    pad: int,
    device: torch.device,
) -> list[Tensor]:
    """The logits of each token of each text, and of the one after it, [tokens + 1, vocabulary] each."""
    ids, mask = pad_left([[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)], pad, device)
    kept = max(map(len, texts)) + 1
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=kept,
        use_cache=False,
    ).logits
    return [row[kept - len(text) - 1 :] for row, text in zip(out, texts, strict=True)]


def answer_from_drafts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[Sequence[int]],
    *,
    end_ids: Sequence[int],
    most: int,
    pad: int,
    device: torch.device,
) -> list[list[int]]:
    """What `answer` gives for these prompts, found faster where the drafts are right."""
    found: list[list[int]] = []
    unfinished: list[int] = []
    for row, (draft, logits) in enumerate(
        zip(drafts, read(model, prompts, drafts, pad, device), strict=True)
    ):
        chosen = logits.argmax(-1).tolist()
        agreed = next((n for n, token in enumerate(draft) if chosen[n] != token), len(draft))
        written = [*draft[:agreed], chosen[agreed]][:most]
        ends = next((n for n, token in enumerate(written) if token in end_ids), None)
        found.append(written if ends is None else written[:ends])
        if ends is None and len(written) < most:
            unfinished.append(row)
    if unfinished:
        rows = [[*prompts[row], *found[row]] for row in unfinished]
        # Rows may write different numbers of further tokens; those that write too many are cut.
        left = most - min(len(found[row]) for row in unfinished)
        more = answer(model, *pad_left(rows, pad, device), end_ids=end_ids, most=left)
        for row, added in zip(unfinished, more, strict=True):
            found[row] = [*found[row], *added][:most]
    return found
