"""The comparison treats both sides alike: same prompts, alternating order, its own thread count given back."""

from __future__ import annotations

import itertools

import pytest

pytestmark = pytest.mark.reference

torch = pytest.importorskip("torch")

from hardpoint.bench.transformers_peer import compare  # noqa: E402
from hardpoint.errors import ConfigError  # noqa: E402
from hardpoint.request.output import CompletionOutput, RequestOutput  # noqa: E402


class Sides:
    """Plays both, and notes who was asked for what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...], int, int]] = []

    def note(self, side, prompts, tokens) -> None:
        self.calls.append((side, tuple(map(tuple, prompts)), tokens, torch.get_num_threads()))


class Ours(Sides):
    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert sampling_params.temperature == 0
        assert sampling_params.ignore_eos
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        self.note("ours", ids, sampling_params.max_tokens)
        made = [0] * sampling_params.max_tokens
        return [RequestOutput("r", None, prompt, [CompletionOutput(0, token_ids=made)]) for prompt in ids]


class Theirs:
    def __init__(self, sides: Sides) -> None:
        self.sides = sides

    def generate(self, prompts, output_len):
        self.sides.note("theirs", prompts, output_len)
        return 2.0


def test_both_sides_are_treated_alike() -> None:
    ours, numbers, told = Ours(), itertools.count(), []
    before = torch.get_num_threads()
    (result,) = compare(
        ours, Theirs(ours), lambda size: [[next(numbers), 7] for _ in range(size)],
        output_len=5, concurrencies=[3], rounds=2, threads=before + 1, on_round=told.append,
    )  # fmt: skip
    assert [side for side, *_ in ours.calls] == ["ours", "theirs", "ours", "theirs", "theirs", "ours"]
    assert [tokens for _, _, tokens, _ in ours.calls] == [2, 2, 5, 5, 5, 5]
    for first, second in zip(ours.calls[::2], ours.calls[1::2], strict=True):
        assert first[1] == second[1]
    assert len({prompts for _, prompts, _, _ in ours.calls}) == 3
    assert {threads for side, *_, threads in ours.calls if side == "theirs"} == {before + 1}
    assert {threads for side, *_, threads in ours.calls if side == "ours"} == {before} == {torch.get_num_threads()}
    assert result.theirs == (2.0, 2.0)
    assert len(result.ours) == len(told) == 2


@pytest.mark.parametrize("prompts", [[[1, 2], [3]], ["text", "text"]])
def test_prompts_must_be_equally_long_ids(prompts) -> None:
    ours = Ours()
    with pytest.raises(ConfigError, match="equally long"):
        compare(ours, Theirs(ours), lambda _: prompts, output_len=5, concurrencies=[2], rounds=1, threads=1)
