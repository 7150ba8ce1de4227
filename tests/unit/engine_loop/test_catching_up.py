"""What the device put off at the start is done piece by piece while nobody asks for anything."""

from __future__ import annotations

from collections.abc import Iterator

from null_engines import Built, PacedExecutor, info, scheduler

from hardpoint.engine.lifecycle import QUIET, serve_engine
from hardpoint.engine.loop import Engine
from hardpoint.protocol.messages import Abort, EngineRequest, Failure, FromEngine, Outputs, Shutdown, Submit, ToEngine
from hardpoint.request.sampling import SamplingParams
from hardpoint_platforms.errors import DeviceLost


class Script:
    """A channel that hands out what it is told and notes how long the engine would have waited."""

    def __init__(self, messages: Iterator[list[ToEngine]]) -> None:
        self._messages = messages
        self.waits: list[float | None] = []
        self.sent: list[FromEngine] = []

    def receive(self, timeout: float | None) -> list[ToEngine]:
        self.waits.append(timeout)
        return next(self._messages)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def served(executor: PacedExecutor, channel: Script) -> int:
    engine = Engine(scheduler(), executor, overlap=True)
    return serve_engine(channel, lambda progress: Built(engine, info()))


def submit(max_tokens: int) -> list[ToEngine]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Submit([EngineRequest(request_id="r", prompt=[1, 2, 3], params=params)])]


def test_pieces_come_after_a_quiet_time_and_then_the_engine_sleeps() -> None:
    executor, channel = PacedExecutor(put_off=3), Script(iter([[], [], [], [Shutdown()]]))
    assert served(executor, channel) == 0
    assert executor.put_off == 0
    assert channel.waits == [QUIET, 0.0, 0.0, None]


def test_requests_come_first_and_the_quiet_time_begins_anew() -> None:
    executor = PacedExecutor(put_off=3)
    left = []

    def messages() -> Iterator[list[ToEngine]]:
        yield []  # one piece
        yield submit(4)
        while not any(o.finish_reason for m in channel.sent if isinstance(m, Outputs) for o in m.outputs):
            left.append(executor.put_off)
            yield []
        left.append(executor.put_off)
        yield []  # the second piece
        yield [Abort(["nobody"])]  # whoever speaks is heard, and no piece is done meanwhile
        yield []
        yield [Shutdown()]

    channel = Script(messages())
    assert served(executor, channel) == 0
    assert set(left) == {2}
    assert executor.put_off == 0
    assert channel.waits[:2] == [QUIET, 0.0]
    assert channel.waits[-4:] == [QUIET, 0.0, 0.0, None]


def test_an_error_meanwhile_is_the_end_of_the_engine() -> None:
    class Lost(PacedExecutor):
        def catch_up(self) -> bool:
            raise DeviceLost("the device fell off the bus")

    channel = Script(iter([[]]))
    assert served(Lost(), channel) == 1
    assert isinstance(channel.sent[-1], Failure)
    assert "fell off the bus" in channel.sent[-1].message
