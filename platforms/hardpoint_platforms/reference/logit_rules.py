"""What changes logits before a draw: the allowed mask, biases, penalties."""

from __future__ import annotations

import torch

from hardpoint_platforms.batch import LogitBias, Penalties, SamplingInputs


def adjust(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """float32 [R, V] after mask, bias and penalties; the argument itself where nothing applies."""
    if inputs.allowed is not None:
        logits = logits.masked_fill(~unpack_mask(inputs.allowed, logits.shape[1]), float("-inf"))
    if inputs.bias is not None:
        logits = _add_bias(logits, inputs.bias)
    if inputs.penalties is not None:
        logits = penalize(logits, inputs.penalties)
    return logits


def unpack_mask(allowed: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bool [R, V] of int32 [R, ceil(V / 32)], lowest bit first."""
    bits = (allowed[..., None] >> torch.arange(32, device=allowed.device, dtype=allowed.dtype)) & 1
    return bits.flatten(-2)[:, :vocab_size].bool()


def _add_bias(logits: torch.Tensor, bias: LogitBias) -> torch.Tensor:
    return logits.index_put((bias.rows, bias.tokens), bias.values.to(logits.dtype), accumulate=True)


def penalize(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Repetition over prompt and output, then frequency and presence over the output.

    The cost follows the length of the histories, not the vocabulary: only tokens that occurred are touched, and a row
    without penalties keeps its logits bit by bit.
    """
    rows, length = penalties.history.shape
    if length == 0:
        return logits
    vocab_size = logits.shape[1]
    tokens, order = penalties.history.sort(dim=-1)
    places = torch.arange(length, device=logits.device)
    in_output = places >= penalties.prompt_lengths[:, None]
    in_output = in_output.expand(rows, length).gather(1, order)
    running = torch.cat((in_output.new_zeros((rows, 1)), in_output), dim=1).cumsum(-1)
    first = torch.searchsorted(tokens, tokens)
    behind = torch.searchsorted(tokens, tokens, right=True)
    counts = running.gather(1, behind) - running.gather(1, first)  # times each token was generated
    # one column more takes the unused places
    padded = torch.cat((logits, logits.new_zeros((rows, 1))), dim=1)
    x = padded.gather(1, tokens)
    repetition = penalties.repetition[:, None]
    x = torch.where(x > 0, x / repetition, x * repetition)
    x = x - penalties.frequency[:, None] * counts
    x = x - penalties.presence[:, None] * (counts > 0)
    return padded.scatter(1, tokens, x)[:, :vocab_size]
