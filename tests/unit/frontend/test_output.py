"""Token outputs become deltas: text, stop strings, log-probabilities, n sequences (cases S-02, S-03, S-33)."""

from __future__ import annotations

from scripted_tokenizers import byte_level

from hardpoint.frontend.output import OutputProcessor
from hardpoint.protocol.messages import TokenLogprobs, TokenOutput
from hardpoint.request.output import SequenceDelta
from hardpoint.request.sampling import SamplingParams

TOKENIZER = byte_level()
END = TOKENIZER.eos_token_ids[0]


def out(tokens: list[int], finish: str | None = None, **more: object) -> TokenOutput:
    return TokenOutput(request_id="r#0", token_ids=tokens, finish_reason=finish, **more)  # type: ignore[arg-type]


def run(params: SamplingParams, text: str, finish: str = "length", group: int = 1) -> list[SequenceDelta]:
    processor = OutputProcessor(TOKENIZER, TOKENIZER.encode("prompt"), params)
    ids = TOKENIZER.encode(text)
    groups = [ids[i : i + group] for i in range(0, len(ids), group)]
    deltas = [processor.process(0, out(g, finish if g is groups[-1] else None)) for g in groups]
    return [delta for delta in deltas if delta is not None]


def test_stop_string_in_groups_counts_tokens_up_to_the_match() -> None:
    for group in (1, 3, 7):
        deltas = run(SamplingParams(stop=("lo w",)), "hello world", group=group)
        assert "".join(d.text for d in deltas) == "hel"
        assert sum(len(d.token_ids) for d in deltas) == len("hello w")
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
        assert deltas[-1].stop_reason == "lo w"


def test_stop_strings_count_from_min_tokens_on() -> None:
    deltas = run(SamplingParams(stop=("a",), min_tokens=4), "aaaaaaa")
    assert sum(len(d.token_ids) for d in deltas) == 4
    assert "".join(d.text for d in deltas) == "aaa"


def test_held_back_text_comes_at_the_end() -> None:
    deltas = run(SamplingParams(stop=("end!",)), "the end")
    assert "".join(d.text for d in deltas) == "the end"
    assert deltas[-1].finish_reason == "length"


def test_unfinished_character_comes_as_a_mark_at_the_end() -> None:
    processor = OutputProcessor(TOKENIZER, [], SamplingParams())
    ids = TOKENIZER.encode("é")
    assert processor.process(0, out(ids[:1])).text == ""  # type: ignore[union-attr]
    assert processor.process(0, out([], "length")).text == "\ufffd"  # type: ignore[union-attr]
    assert processor.finished


def test_stop_token_is_counted_but_not_shown() -> None:
    a, b = TOKENIZER.encode("ab")
    for include, text in ((False, "a"), (True, "ab")):
        params = SamplingParams(stop_token_ids=(b,), include_stop_str_in_output=include)
        delta = OutputProcessor(TOKENIZER, [], params).process(0, out([a, b], "stop", stop_reason=b))
        assert delta is not None
        assert (delta.text, delta.token_ids, delta.stop_reason) == (text, (a, b), b)
    shown = OutputProcessor(TOKENIZER, [], SamplingParams(skip_special_tokens=False)).process(0, out([a, END], "stop"))
    assert shown is not None
    assert shown.text == "a"


def test_first_token_stops_with_logprobs() -> None:
    newline = TOKENIZER.encode("\n")[0]
    processor = OutputProcessor(TOKENIZER, [], SamplingParams(stop=("\n",), logprobs=1))
    delta = processor.process(0, out([newline], logprobs=[TokenLogprobs([newline, 5], [-0.1, -3.0], 1)]))
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "\n")
    assert delta.logprobs is not None
    assert len(delta.logprobs) == len(delta.token_ids) == 1
    assert processor.process(0, out([5])) is None


def test_logprobs_keep_the_drawn_token_first_and_once() -> None:
    a, b, c = TOKENIZER.encode("abc")
    processor = OutputProcessor(TOKENIZER, [], SamplingParams(logprobs=2))
    delta = processor.process(0, out([c], logprobs=[TokenLogprobs([c, a, c], [-2.0, -0.5, -2.0], 2)]))
    assert delta is not None
    assert delta.logprobs is not None
    (position,) = delta.logprobs
    assert list(position) == [c, a]
    assert (position[c].rank, position[c].decoded_token) == (2, "c")
    assert (position[a].rank, position[a].logprob) == (1, -0.5)
    assert b not in position


def test_sequences_end_one_by_one() -> None:
    processor = OutputProcessor(TOKENIZER, [], SamplingParams(n=3))
    ids = TOKENIZER.encode("xyz")
    for index in (1, 0):
        delta = processor.process(index, out([ids[index]], "length"))
        assert delta is not None
        assert (delta.index, delta.text) == (index, "xyz"[index])
    assert processor.unfinished() == [2]
    ended = processor.end(2, "abort")
    assert ended is not None
    assert ended.finish_reason == "abort"
    assert processor.finished
    assert processor.end(2, "abort") is None


def test_prompt_logprobs_and_cached_tokens_pass_without_tokens() -> None:
    processor = OutputProcessor(TOKENIZER, [], SamplingParams(max_tokens=0, prompt_logprobs=0))
    scores = [None, TokenLogprobs([7], [-1.0], 4)]
    delta = processor.process(0, out([], "length", prompt_logprobs=scores, cached_tokens=0))
    assert delta is not None
    assert delta.prompt_logprobs is not None
    assert delta.prompt_logprobs[0] is None
    assert delta.prompt_logprobs[1][7].rank == 4
    assert delta.cached_tokens == 0


def test_without_text() -> None:
    for processor in (
        OutputProcessor(None, [], SamplingParams()),
        OutputProcessor(TOKENIZER, [], SamplingParams(detokenize=False)),
    ):
        delta = processor.process(0, out([65], "length"))
        assert delta is not None
        assert (delta.text, delta.token_ids) == ("", (65,))
