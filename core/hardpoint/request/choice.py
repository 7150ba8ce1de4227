"""Whether a request's constraints always leave a token to draw. Pure; quick unless they nearly leave none."""

from __future__ import annotations

from collections.abc import Iterable

from hardpoint.errors import RequestError
from hardpoint.request.sampling import SamplingParams


def check_choice(params: SamplingParams, vocab_size: int | None) -> None:
    """Raise RequestError if at some place of some output every token is masked.

    allowed_token_ids masks what it does not name, min_tokens the tokens that end the output, and a bad word its last
    token behind its others. logit_bias is finite and masks nothing. Ends and bad words count as far as they are known
    (eos_token_ids, bad_words_ids: `hardpoint.frontend.requests.complete`). vocab_size None: unknown, so only
    allowed_token_ids can leave too few.
    """
    if params.max_tokens == 0 or (params.allowed_token_ids is None and vocab_size is None):
        return
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(params.eos_token_ids))
    masked = ends if params.min_tokens > 0 else set()
    words = set(params.bad_words_ids)
    most = len(masked) + len(words)
    allowed = params.allowed_token_ids
    if allowed is None:
        if vocab_size is None or vocab_size > most:
            return
        choice = set(range(vocab_size))
    else:
        # long lists are told by their beginning
        if len(set(allowed[: most + 1])) > most or len(choice := set(allowed)) > most:
            return
    dead = _dead_end(choice, ends, words, params.min_tokens, params.max_tokens)
    if dead is None:
        return
    fields = [] if allowed is None else ["allowed_token_ids"]
    if len(dead) < params.min_tokens and choice & ends:
        fields += ["min_tokens", *(["stop_token_ids"] if choice.intersection(params.stop_token_ids) else [])]
    fields += ["bad_words"] if any(word[-1] in choice for word in words) else []
    where = f" behind the tokens {list(dead[-8:])}" if dead else ""
    raise RequestError(
        f"{', '.join(fields)}: together they leave no token to draw{where}",
        field=fields[0],
        hint="min_tokens forbids the tokens that end the output until so many tokens are there"
        if "min_tokens" in fields
        else None,
    )


def _dead_end(
    choice: set[int], ends: set[int], words: Iterable[tuple[int, ...]], least: int, most: int | None
) -> tuple[int, ...] | None:
    """An output of `choice` behind which nothing can be drawn, or None.

    What is masked depends on the longest beginning of a bad word that the output ends with, and on nothing before; so
    these beginnings are all there is to try, each as a whole output, where min_tokens masks most. Words are compared as
    texts with a character per token, which costs no loop over tokens.
    """
    letters: dict[int, str] = {}
    text = {word: "".join(letters.setdefault(token, chr(len(letters))) for token in word) for word in words}
    drawable = choice - ends
    for start in sorted({word[:-1] for word in text} | {()}, key=lambda start: (len(start), start)):
        if (most is not None and len(start) >= most) or not drawable.issuperset(start):
            continue
        written = "".join(letters[token] for token in start)
        left = choice - ends if len(start) < least else choice
        if left <= {word[-1] for word, own in text.items() if written.endswith(own[:-1])} and not any(
            own in written for own in text.values()
        ):
            return start
    return None
