"""From a checked request to the engine's messages: children, seeds, bad words (case S-05)."""

from __future__ import annotations

from scripted_tokenizers import byte_level

from hardpoint.frontend.requests import bad_word_ids, child_seed, complete, expand
from hardpoint.request.sampling import SamplingParams

TOKENIZER = byte_level([("Ġ", "n"), ("Ġn", "o")])


def test_children_share_the_parents_prompt() -> None:
    children = expand([1, 2], SamplingParams(n=3, seed=7, prompt_logprobs=1, stop=("x",)), request_id="r", priority=2)
    assert [c.request_id for c in children] == ["r#0", "r#1", "r#2"]
    assert [c.parent for c in children] == [None, "r#0", "r#0"]
    assert [c.params.prompt_logprobs for c in children] == [1, None, None]
    assert {c.priority for c in children} == {2}
    assert all(c.params.n == 1 and c.params.stop == () for c in children)
    assert len({c.params.seed for c in children}) == 3


def test_seeds_are_stable_and_their_own() -> None:
    assert child_seed(1234, 0) == 1234
    seeds = {child_seed(seed, i) for seed in range(50) for i in range(20)}
    assert len(seeds) == 1000
    assert all(-(2**63) <= s < 2**63 for s in (child_seed(-(2**63), i) for i in range(9)))
    assert child_seed(1234, 2) == child_seed(1234, 2)


def test_without_a_seed_children_have_none() -> None:
    assert [c.params.seed for c in expand([1], SamplingParams(n=2), request_id="r")] == [None, None]


def test_bad_words_with_and_without_space() -> None:
    n, o = TOKENIZER.encode("no")
    assert bad_word_ids(["no"], TOKENIZER) == ((n, o), (TOKENIZER.encode(" no")[0],))
    assert len(TOKENIZER.encode(" no")) == 1


def test_complete_fills_in_what_the_tokenizer_knows() -> None:
    params = complete(SamplingParams(bad_words=("no",)), TOKENIZER)
    assert params.eos_token_ids == TOKENIZER.eos_token_ids
    assert params.bad_words_ids
    own = SamplingParams(eos_token_ids=(5,))
    assert complete(own, TOKENIZER) is own
