"""The FLOPs of a step, which a run prints and compares with the peak of its devices."""

import tiny

from experiments.devices import mesh as meshes
from experiments.engine import run_plan, summary as summaries


def test_a_step_takes_three_times_the_flops_of_the_forward_pass(capsys):
    """The backward pass computes two products for each product of the forward pass: for inputs and for weights.

    The only product of the linear task is x_BD G_CD^T, which takes 2 B D C FLOPs.
    """
    B, mesh = 32, meshes.make(data=1)
    settings = tiny.settings("vision", model=False, train__batch_size=B)
    plan, state = run_plan.prepare(settings, tiny.linear_task(batch=B), mesh, dry_run=True)
    forward = run_plan.forward_flops(plan, state)
    assert 2 * B * tiny.D * tiny.C <= forward < 1.5 * 2 * B * tiny.D * tiny.C
    assert summaries.print_model(plan, state) == 3 * forward
    out = capsys.readouterr().out
    assert f"{summaries.format_si(3 * forward, 'FLOP')} per step (3 x forward) of {B} examples" in out
    assert f"{summaries.format_si(forward / B, 'FLOP')} per token forward" in out
