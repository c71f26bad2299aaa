"""Tools for trained models: each is a command and a function with the same arguments."""

import signal
import sys

if sys.argv[:1] == ["-m"]:  # python -m experiments.tools.NAME: Ctrl-C ends it without a traceback
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
