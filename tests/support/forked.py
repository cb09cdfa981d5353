"""Runs something in a forked process, which may be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch


def signal_of(run: Callable[[], object]) -> int:
    """The signal that ended a fork in which ``run`` ran, or 0; no torch op may have run in this process."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            run()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    if os.WEXITSTATUS(status):
        raise SystemExit("the job failed")
    return 0
