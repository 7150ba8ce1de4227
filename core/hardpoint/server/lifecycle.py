"""Who is being served, and whether anybody new may come in.

Life of a server: loading (the client's `check_health` raises EngineBusy) -> serving -> draining (first signal: nobody
new, the running ones finish) -> stopped (time is up, or a second signal: the running ones get an error). The engine's
death ends it from any state.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hardpoint.errors import EngineBusy


class Ticket:
    """One request in progress.

    `id` is unique among live requests and names it to the engine; `public_id` is the client's own name for it, or the
    same.
    """

    def __init__(self, id: str, public_id: str) -> None:
        self.id = id
        self.public_id = public_id
        self.engine_ids: list[str] = []
        self._interrupt: Callable[[Exception], None] | None = None
        self._pending: Exception | None = None

    def on_interrupt(self, call: Callable[[Exception], None]) -> None:
        """Have `call` told when the request must end early. Called at once if that has happened already."""
        self._interrupt = call
        if self._pending is not None:
            call(self._pending)

    def interrupt(self, reason: Exception) -> None:
        """End the request with this error."""
        self._pending = reason
        if self._interrupt is not None:
            self._interrupt(reason)


class Lifecycle:
    """Owns the tickets of the running requests."""

    def __init__(self) -> None:
        self.draining = False
        self.stopped = False
        self._tickets: dict[str, Ticket] = {}

    @property
    def in_flight(self) -> int:
        """Requests in progress."""
        return len(self._tickets)

    @contextmanager
    def admit(self, public_id: str) -> Iterator[Ticket]:
        """Hold a place for one request. Raises EngineBusy when nobody new may come in."""
        ticket = self.enter(public_id)
        try:
            yield ticket
        finally:
            self.leave(ticket)

    def enter(self, public_id: str) -> Ticket:
        """As `admit`, for requests that end elsewhere; pair it with `leave`."""
        self.check_open()
        id = public_id
        while id in self._tickets:
            id = f"{public_id}-{secrets.token_hex(4)}"
        ticket = Ticket(id, public_id)
        self._tickets[id] = ticket
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request is over. Leaving twice is harmless."""
        self._tickets.pop(ticket.id, None)

    def check_open(self) -> None:
        """Raise EngineBusy when nobody new may come in."""
        if self.draining or self.stopped:
            raise EngineBusy("The server is shutting down.", hint="Try another instance, or again later.")

    def find(self, id: str) -> list[Ticket]:
        """Running requests with this id, as the client named it or as the answer does."""
        bare = id.split("-", 1)[1] if id.startswith(("cmpl-", "chatcmpl-")) else id
        return [
            ticket for ticket in self._tickets.values() if ticket.public_id in (id, bare) or ticket.id in (id, bare)
        ]

    def begin_drain(self) -> None:
        """Nobody new from now on."""
        self.draining = True

    def stop(self, reason: Exception) -> None:
        """End every running request with this error."""
        self.draining = self.stopped = True
        for ticket in list(self._tickets.values()):
            ticket.interrupt(reason)
