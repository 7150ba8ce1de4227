"""Which line of the plugin a failure comes from."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from hardpoint_platforms.guarding import of_thread as frames_of_thread
from hardpoint_platforms.guarding import place_of_code as of_code

__all__ = ["of_code", "of_error", "of_thread"]
_KIT = str(Path(__file__).parent)


def of_error(error: BaseException, folders: Sequence[str]) -> str:
    """The innermost frame in the plugin's folders; where there is none, the innermost outside the kit."""
    seen: set[int] = set()
    link: BaseException | None = error
    fallback = ""
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        frames = traceback.extract_tb(link.__traceback__)
        for frame in reversed(frames):
            if _inside(frame.filename, folders):
                return f"{frame.filename}:{frame.lineno} in {frame.name}"
        outside = [frame for frame in frames if not _inside(frame.filename, (_KIT,))]
        if outside and not fallback:
            fallback = f"{outside[-1].filename}:{outside[-1].lineno} in {outside[-1].name}"
        link = link.__cause__ or link.__context__
    return fallback


def of_thread(thread: threading.Thread, folders: Sequence[str]) -> str:
    """Where a thread stands now: its innermost frame in the plugin's folders, else its innermost frame."""
    stands = frames_of_thread(thread.ident)
    theirs = [stand for stand in stands if _inside(stand.frame.f_code.co_filename, folders)]
    return next(map(str, theirs or stands), "")


def _inside(filename: str, folders: Sequence[str]) -> bool:
    return any(Path(filename).is_relative_to(folder) for folder in folders)
