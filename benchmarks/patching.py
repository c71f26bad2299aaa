"""Time a grid of activation patching next to a loop of hooks of transformer_lens, on random GPT-2 models.

python -m benchmarks.patching 4 12     # numbers of layers; needs pip install -e ".[parity]"

The grid has all layers and 64 tokens. Both libraries take turns with the same weights. A call of inside.patch compiles
its program; "compiled" calls a compiled one. "last logits" computes only the last token's logits, as ours does.
"""

import functools
import os
import sys
import tempfile
import time

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # PyTorch's threads sleep while they wait, so that other work can run
import jax
import numpy as np
import torch
import transformer_lens as lens
import transformers

from experiments.pretrained import open_model
from tfm import inside

W, D, H, N, ANSWER, ROUNDS, LOOP = 50257, 128, 4, 64, 3, 3, "loop of hooks"
CLEAN_BN, OTHER_BN = np.random.default_rng(0).integers(0, W, (2, 1, N))
ROW, COMPILATION = "{:<8}{:<28}" + "{:>15}" * 5, "/jax/core/compile/backend_compile_duration"
COLUMNS = ("layers", "medians of rounds", "seconds", "processor", "compilations", "their seconds", "ratio to loop")


def build(M: int, folder: str) -> dict:
    """Save a random GPT-2 in the folder. Return {name: function that computes the grid} of both libraries."""
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=M, n_positions=N, n_embd=D, n_head=H))
    gpt2.save_pretrained(folder)
    sizes = {"n_layers": M, "d_model": D, "n_ctx": N, "d_head": D // H, "n_heads": H, "d_vocab": W}
    config = lens.HookedTransformerConfig(**sizes, act_fn="gelu_new", device="cpu", init_weights=False)
    ours, theirs = open_model.open(folder), lens.HookedTransformer(config)
    theirs.load_state_dict(lens.pretrained.weight_conversions.convert_gpt2_weights(gpt2, config), strict=False)
    x_MBND = ours.run(CLEAN_BN, look=("hidden",))[1]["hidden"]
    clean, corrupted = theirs.run_with_cache(torch.tensor(CLEAN_BN))[1], torch.tensor(OTHER_BN)

    def loop(**stop: int) -> np.ndarray:
        grid_MN = np.zeros((M, N))
        for m, n in np.ndindex(M, N):
            name, index = f"blocks.{m}.hook_resid_post", torch.tensor([n])
            edit = functools.partial(torch.index_copy, dim=1, index=index, source=clean[name][:, [n]])
            y_BND = theirs.run_with_hooks(corrupted, fwd_hooks=[(name, lambda x, hook, edit=edit: edit(x))], **stop)
            grid_MN[m, n] = (theirs.unembed(theirs.ln_final(y_BND[:, -1:])) if stop else y_BND)[0, -1, ANSWER]
        return grid_MN

    patch = functools.partial(inside.patch, lambda edit: ours.run(OTHER_BN, edit=edit, at=-1)[0][0, ANSWER], "hidden")
    compiled = jax.jit(patch).lower(x_MBND).compile()
    calls = {"inside.patch": lambda: patch(x_MBND), "inside.patch, compiled": lambda: compiled(x_MBND)}
    return calls | {LOOP: loop, f"{LOOP}, last logits": lambda: loop(stop_at_layer=M)}


@torch.no_grad()
def main(layers: list[int]) -> None:
    """Print COLUMNS for each function. Raises AssertionError if grids differ."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, s, **_: name == COMPILATION and events.append(s))
    print(ROW.format(*COLUMNS))
    for M in layers:
        with tempfile.TemporaryDirectory() as folder:
            calls, grids = build(M, folder), {}
        turns = {name: [] for name in calls}
        for name in list(calls) * ROUNDS:
            events.clear()
            begin = time.perf_counter(), time.process_time()
            grids[name] = np.asarray(calls[name]())
            seconds = np.subtract([time.perf_counter(), time.process_time()], begin)
            turns[name].append([*seconds, len(events), sum(events)])
        for name in calls:
            np.testing.assert_allclose(grids[name], grids[LOOP], atol=1e-5)
            rows = [[*row, loop[0] / row[0]] for row, loop in zip(turns[name], turns[LOOP], strict=True)]
            print(ROW.format(M, name, *(f"{x:.3g}" for x in np.median(rows, axis=0))), flush=True)


if __name__ == "__main__":
    main([int(M) for M in sys.argv[1:]])
