"""How a command of this project ends: one plain line for a user's mistake, and the usual exit code for a signal."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# What the machine refuses and the user can put right: a full disk, a folder that may not be written, a file in the way.
MACHINE_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
}


class UserError(Exception):
    """A mistake the user can put right. The message says in one line what was wrong and what to do."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Wrap a command's main(), as a decorator or in a `with`: what a user can meet never ends in a traceback.

    Exit codes: 2 for a UserError or what the machine refuses (after `error: ...` on standard error), Ctrl-C 130,
    SIGTERM 143, a closed pipe 141.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, _terminate) if in_main_thread else None
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader (head, less) has gone. Python flushes stdout once more at exit: give it a place to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        if error.errno not in MACHINE_ERRORS:
            raise
        where = f" {error.filename}" if error.filename else ""
        print(f"error: cannot read or write{where}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous)


def _terminate(signum: int, frame: object) -> None:
    """Turn SIGTERM into an exception, so that `finally` blocks still clean up."""
    raise SystemExit(128 + signum)
