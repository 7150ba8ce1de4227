"""What a request can start with: pages of a cached prefix, or those of its parent's prompt."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from hardpoint.errors import RequestError
from hardpoint.kv.pager import Digests, KVPager, Match
from hardpoint.request.request import Request
from hardpoint.scheduler.rows import RowTable


class Sharing:
    """Looks at live requests, rows and pages; changes nothing."""

    def __init__(self, requests: Mapping[str, Request], rows: RowTable, pager: KVPager) -> None:
        self._requests = requests
        self._rows = rows
        self._pager = pager

    def digests(self, request: Request) -> Digests:
        """The request's hash chain, as the pager asks for it."""
        return partial(request.digests, page_tokens=self._pager.page_tokens)

    def match(self, request: Request) -> Match:
        """The most pages that a request can start with. None while its prompt is to be scored: then all is computed."""
        if request.wants_prompt_logprobs:
            return Match()
        cached = self._pager.match(self.digests(request), request.known)
        parent = self.parent(request)
        if parent is None or parent.row < 0 or not self.prompt_computed(parent):
            return cached
        forked = self._pager.shared_with(parent.row, parent.prompt_length)
        return forked if forked.tokens > cached.tokens else cached

    def parent(self, request: Request) -> Request | None:
        """The live request whose prompt it shares. Raises RequestError if the prompts differ."""
        parent = self._requests.get(request.parent) if request.parent else None
        if parent is None:
            return None
        if parent.cache_salt != request.cache_salt or not np.array_equal(parent.prompt, request.prompt):
            raise RequestError(f"request {request.id} does not have the prompt of its parent", field="prompt")
        return parent

    def prompt_computed(self, request: Request) -> bool:
        """Whether steps submitted so far compute the whole prompt."""
        row = request.row
        if row < 0:
            return bool(request.output)
        # one that was preempted computes its prompt again, so output alone says nothing
        return int(self._rows.computed[row]) >= request.prompt_length
