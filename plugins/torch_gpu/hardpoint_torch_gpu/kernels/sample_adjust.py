"""What changes logits before a draw: the mask in the pass that copies them, biases and penalties where they are.

The copy is dense, all else costs what the entries and histories are long. A token of a history is penalized once: its
count is taken out of the table by an exchange, and whoever got it changes the logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_platforms.batch import LogitBias, Penalties, SamplingInputs
from hardpoint_torch_gpu.kernels.sample_pieces import Pieces, pieces_of

_BLOCK = 1024
#: Set in the count of a token that the prompt holds; the bits below it count the output.
_PROMPT: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["entries"])
def _bias(x_ptr, rows_ptr, tokens_ptr, values_ptr, entries, vocab, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    value = tl.load(values_ptr + entry, mask=inside, other=0.0)
    used = inside & (value != 0.0)  # a static step fills up with zeros for one and the same place
    row = tl.load(rows_ptr + entry, mask=used, other=0)
    token = tl.load(tokens_ptr + entry, mask=used, other=0)
    tl.atomic_add(x_ptr + row * vocab + token, value, mask=used, sem="relaxed")


@triton.jit
def _neutral(presence_ptr, frequency_ptr, repetition_ptr, row):
    return (
        (tl.load(presence_ptr + row) == 0.0)
        & (tl.load(frequency_ptr + row) == 0.0)
        & (tl.load(repetition_ptr + row) == 1.0)
    )


@triton.jit(do_not_specialize=["length"])
def _count(
    counts_ptr, history_ptr, prompts_ptr, presence_ptr, frequency_ptr, repetition_ptr, length, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if _neutral(presence_ptr, frequency_ptr, repetition_ptr, row):
        return
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(history_ptr + row * length + place, mask=place < length, other=vocab)
    real = (token >= 0) & (token < vocab)
    said = place >= tl.load(prompts_ptr + row)
    counts = counts_ptr + row * vocab + token
    tl.atomic_add(counts, tl.full([BLOCK], 1, tl.int32), mask=real & said, sem="relaxed")
    tl.atomic_or(counts, tl.full([BLOCK], _PROMPT, tl.int32), mask=real & (said == 0), sem="relaxed")


@triton.jit(do_not_specialize=["length"])
def _penalize(
    x_ptr, counts_ptr, history_ptr, presence_ptr, frequency_ptr, repetition_ptr, length, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if _neutral(presence_ptr, frequency_ptr, repetition_ptr, row):
        return
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(history_ptr + row * length + place, mask=place < length, other=vocab)
    real = (token >= 0) & (token < vocab)
    spot = row * vocab + token
    count = tl.atomic_xchg(counts_ptr + spot, tl.zeros([BLOCK], tl.int32), mask=real, sem="relaxed")
    mine = real & (count != 0)
    times = (count & (_PROMPT - 1)).to(tl.float32)
    x = tl.load(x_ptr + spot, mask=mine, other=0.0)
    x = tl.where(x > 0.0, x / repetition, x * repetition)
    x = x - frequency * times
    x = x - tl.where(times > 0.0, presence, 0.0)
    tl.store(x_ptr + spot, x, mask=mine)


def _add_bias(x: torch.Tensor, bias: LogitBias) -> None:
    entries = len(bias.rows)
    if entries:
        _bias[(triton.cdiv(entries, _BLOCK),)](
            x, bias.rows.contiguous(), bias.tokens.contiguous(), bias.values.contiguous(), entries, x.shape[1],
            BLOCK=_BLOCK,
        )  # fmt: skip


def _add_penalties(x: torch.Tensor, penalties: Penalties) -> None:
    rows, length = penalties.history.shape
    if not length:
        return
    vocab = x.shape[1]
    history = penalties.history.contiguous()
    strengths = [part.contiguous() for part in (penalties.presence, penalties.frequency, penalties.repetition)]
    counts = torch.zeros((rows, vocab), dtype=torch.int32, device=x.device)
    grid = (rows, triton.cdiv(length, _BLOCK))
    _count[grid](counts, history, penalties.prompt_lengths.contiguous(), *strengths, length, vocab, BLOCK=_BLOCK)
    _penalize[grid](x, counts, history, *strengths, length, vocab, BLOCK=_BLOCK)


def adjusted(
    logits: torch.Tensor, inputs: SamplingInputs, sums: bool, block: int = 0
) -> tuple[torch.Tensor, torch.Tensor, Pieces]:
    """Logits after mask, bias and penalties, float32 [R, V]; temperatures float32 [R]; the pieces of the logits.

    logits: float32 [R, V], contiguous, R above 0; returned as they are where nothing applies. `sums`: also sum the
    pieces' weights at the rows' temperatures.
    """
    temperature = inputs.temperature.contiguous()
    allowed = None if inputs.allowed is None else inputs.allowed.contiguous()
    sparse = inputs.bias is not None or inputs.penalties is not None
    if allowed is None and not sparse:
        return logits, temperature, pieces_of(logits, temperature, sums=sums, block=block)
    x = torch.empty_like(logits)
    pieces = pieces_of(logits, temperature, allowed, x, sums=sums and not sparse, block=block)
    if not sparse:
        return x, temperature, pieces
    if inputs.bias is not None:
        _add_bias(x, inputs.bias)
    if inputs.penalties is not None:
        _add_penalties(x, inputs.penalties)
    after = pieces_of(x, temperature, sums=sums, block=block)
    return x, temperature, Pieces(after.block, after.count, after.best, after.at, pieces.raw, after.sums)
