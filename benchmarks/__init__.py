"""The project beside what a user would pick instead, on the same machine: python -m benchmarks.

Every participant (ours, transformers on PyTorch, Flax) is a process of its own, started once for a workload; it builds
the same model, warms up, and then waits. The participants are timed in turns, A B C A B C ..., while the others sleep,
and a peer's time is divided by ours of the same turn.
"""
