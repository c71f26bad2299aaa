"""What is done with a trained model: each tool is a command, and a function of the same arguments."""

import sys

if sys.argv[:1] == ["-m"]:  # python -m experiments.tools.NAME: it takes seconds to import what does better
    from experiments.engine import signals

    signals.from_the_start()
