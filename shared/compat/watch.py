"""Catch every message that transformers gives during a call, whichever way it takes: logging or warnings."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from transformers.utils import logging as transformers_logging


@dataclass(frozen=True)
class Message:
    """`channel` is the logger's level, or the warning's category; `where` is the line that gave the message."""

    channel: str
    text: str
    where: str


class Handler(logging.Handler):
    def __init__(self, handle: Callable[[logging.LogRecord], None]):
        super().__init__(logging.WARNING)
        self.emit = handle


@contextmanager
def log_handler(handle: Callable[[logging.LogRecord], None]):
    """Call `handle` with each record transformers logs meanwhile, as in a fresh process: what it logs only once, too.

    transformers' own handler, which prints to standard error, is put aside. An exception that `handle` raises passes
    through the call that logged.
    """
    transformers_logging.warning_once.cache_clear()
    logger, handler = logging.getLogger("transformers"), Handler(handle)
    transformers_logging.disable_default_handler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        transformers_logging.enable_default_handler()


@contextmanager
def messages():
    """The list of messages given meanwhile, in order of each channel."""
    found: list[Message] = []

    def log(record: logging.LogRecord) -> None:
        found.append(Message(f"logger.{record.levelname.lower()}", record.getMessage(), logging_line()))

    with log_handler(log), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield found
    found += [Message(w.category.__name__, str(w.message), place(w.filename, w.lineno)) for w in warned]


def logging_line() -> str:
    """The line that logs just now: the nearest caller that is not itself about logging."""
    frame = inspect.currentframe()
    while frame.f_code.co_filename in (__file__, logging.__file__, transformers_logging.__file__):
        frame = frame.f_back
    return place(frame.f_code.co_filename, frame.f_lineno)


def place(path: str, line: int) -> str:
    """A line of code as `package/module.py:line`, without this machine's folders."""
    folder = max((entry for entry in sys.path if path.startswith(f"{entry}/")), key=len, default="")
    return f"{path.removeprefix(folder).lstrip('/')}:{line}"
