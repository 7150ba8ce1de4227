"""The channel: order, nothing lost, a private folder that goes, no blocking without a peer."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from pathlib import Path

from hardpoint.protocol.channel import EngineChannel, FrontChannel, MemoryChannel, PulseSender
from hardpoint.protocol.messages import Abort, FromEngine, Heartbeat, Progress, Shutdown, Submit, ToEngine


def folder_of(channel: FrontChannel) -> Path:
    return Path(channel.addresses.pair.removeprefix("ipc://")).parent


def echo(channel: FrontChannel, count: int) -> None:
    """An engine that answers each abort with its number, and with a heartbeat at the start and the end."""
    pulse = PulseSender(channel.addresses)
    pulse.send(Heartbeat(1.0))
    side = EngineChannel(channel.addresses)
    side.send(Progress("hello", 0.0))
    seen = 0
    while seen < count:
        for message in side.receive(None):
            assert isinstance(message, Abort)
            side.send(Progress(message.request_ids[0], 1.0))
            seen += 1
    assert side.receive(0.0) == []
    side.close()
    pulse.close()


async def until(condition: object, timeout: float = 10.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def test_messages_arrive_in_order_and_the_folder_goes() -> None:
    async def main() -> None:
        channel = FrontChannel()
        folder, got = folder_of(channel), []
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700

        def receive(message: FromEngine) -> None:
            got.append(message)
            # sent from within a callback, when the readiness signal is easily lost
            if isinstance(message, Progress) and message.phase == "hello":
                for i in range(500):
                    channel.send(Abort([str(i)]))

        channel.attach(asyncio.get_running_loop(), receive)
        thread = threading.Thread(target=echo, args=(channel, 500))
        thread.start()
        await until(lambda: len([m for m in got if isinstance(m, Progress)]) == 501)
        thread.join()
        assert [m.phase for m in got if isinstance(m, Progress)][1:] == [str(i) for i in range(500)]
        assert Heartbeat(1.0) in got
        assert not folder.exists()
        channel.close()
        channel.close()
        channel.send(Shutdown())

    asyncio.run(main())


def test_sending_without_a_peer_does_not_block() -> None:
    channel = FrontChannel()
    channel.send(Shutdown())
    folder = folder_of(channel)
    channel.close()
    assert not folder.exists()


def test_memory_channel() -> None:
    async def main() -> None:
        channel, got = MemoryChannel(), []
        channel.attach(asyncio.get_running_loop(), got.append)
        sent: list[ToEngine] = [Submit([]), Abort(["a"])]
        for message in sent:
            channel.tell(message)
        assert channel.receive(None) == sent
        assert channel.receive(0.0) == []
        thread = threading.Thread(target=channel.send, args=(Progress("x", 1.0),))
        thread.start()
        await until(lambda: got)
        thread.join()
        assert got == [Progress("x", 1.0)]

    asyncio.run(main())
