"""What may come in at all, and how long it may get. Refusals name the request's field."""

from __future__ import annotations

from hardpoint.errors import PromptTooLong, RequestError, TooManyRequests
from hardpoint.kv.groups import Windows, capacity_tokens
from hardpoint.kv.pager import KVPager, Match
from hardpoint.request.request import Request
from hardpoint.scheduler.rows import RowTable
from hardpoint.scheduler.settings import SchedulerSettings


class Admission:
    """Knows the engine's limits.

    Attributes:
        capacity: longest sequence, in tokens, that the whole page pool can hold.
    """

    def __init__(self, settings: SchedulerSettings, windows: Windows, page_tokens: int, usable_pages: int) -> None:
        self._settings = settings
        self._page_tokens = page_tokens
        self._usable_pages = usable_pages
        chunk = settings.min_chunk if settings.chunked_prefill else None
        self.capacity = capacity_tokens(windows, page_tokens, usable_pages, chunk)

    def check(self, request: Request, waiting: int) -> None:
        """Raise TooManyRequests, PromptTooLong or RequestError for what can never be served.

        waiting: requests in the queue now.
        """
        settings, length = self._settings, request.prompt_length
        if waiting >= settings.max_waiting:
            raise TooManyRequests(f"{waiting} requests are waiting already; try again later")
        if not length:
            raise RequestError("the prompt is empty: at least one token is needed", field="prompt")
        scoring = request.params.max_tokens == 0
        if length > settings.max_model_len:
            raise PromptTooLong(
                f"the prompt has {length} tokens, the context holds {settings.max_model_len}", field="prompt"
            )
        if length == settings.max_model_len and not scoring:
            raise PromptTooLong(
                f"the prompt fills the context of {settings.max_model_len} tokens: no room for output",
                field="max_tokens",
            )
        if length > self.capacity:
            raise PromptTooLong(
                f"the prompt has {length} tokens, the KV cache ({self._usable_pages} pages of {self._page_tokens} "
                f"tokens) holds {self.capacity}",
                field="prompt",
            )
        if not settings.chunked_prefill and length > settings.budget:
            raise PromptTooLong(
                f"the prompt has {length} tokens, a step takes {settings.budget}, and chunked prefill is off",
                field="prompt",
            )

    def max_total(self, request: Request) -> int:
        """Most tokens, prompt and output, that a request can come to: by its own wish, the context and the pool.

        The last token drawn is never computed, so the pool allows one more than it holds.
        """
        most = min(self._settings.max_model_len, self.capacity + 1)
        wish = request.params.max_tokens
        return most if wish is None else min(most, request.prompt_length + wish)


def fit(
    settings: SchedulerSettings, rows: RowTable, pager: KVPager, request: Request, match: Match, query: int
) -> tuple[int, int]:
    """How much of a first chunk of `query` tokens the free pages hold, and how many pages are lacking to let it in.

    While others run, there must be pages for all its tokens, for those that running prompts still need, and one per
    running row and group: else it would be let in only to be preempted. Alone it needs no more than its chunk.
    """
    order, groups = rows.order(), len(pager.windows)
    free = pager.available_pages - match.idle
    if len(order):
        free -= len(order) * groups + pager.pending(order, rows.known[order])
    room = max(free, 0) // groups * pager.page_tokens
    fits = settings.chunk(request.known - match.tokens, min(query, room))
    if not len(order):
        return fits, 0 if fits else 1
    lacking = pager.need(request.known, match.columns, fits or query) - free
    return fits, max(lacking, 0 if fits else 1)
