"""How long what passes between TPU chips takes by the compiled text, and how much of it is waited for."""

import pytest
from test_hlo import BODY, FUSED, LOOP, estimate, replaced


@pytest.mark.parametrize(
    ("kind", "groups", "bytes_passed"),
    [
        ("all-gather", "{{0,1,2,3},{4,5,6,7}}", 3 / 4 * 60),
        ("all-gather", "[2,4]<=[8]", 3 / 4 * 60),
        ("reduce-scatter", "mesh['a'=2,'b'=3] {'a','b'}", 5 * 60),
        ("all-reduce", "mesh['a'=2,'b'=3] {'b'}", 2 * 2 / 3 * 60),
        ("all-reduce", "{{0},{1}}", 0),
        ("all-to-all", "{{0,1,2,3}}", 60),
        ("collective-permute", "{{0,1}}", 2 * 60),
    ],
)
def test_collective_takes_as_long_as_its_bytes_pass_a_ring(kind, groups, bytes_passed):
    passed = f"{kind}(%x.1), replica_groups={groups}, to_apply=%add"
    entry = f"%x.1 = f32[3,5] parameter(0)\n ROOT %sum.1 = f32[3,5] {passed}"
    found = estimate(entry, clock=2.0, ring=3.0)
    assert found.passing == found.waited == pytest.approx(bytes_passed / 3)


def test_sum_of_which_a_fusion_keeps_a_part_is_scattered():
    summed = FUSED.replace("%fused.1", "%all-reduce-scatter.1").replace(
        "exponential(%param_0.1)", "all-reduce(%param_0.1), replica_groups={{0,1,2}}"
    )
    entry = "%x.1 = f32[3,5] parameter(0)\n ROOT %f.1 = f32[1,5] fusion(%x.1), calls=%all-reduce-scatter.1"
    assert estimate(entry, summed).collectives == {"reduce-scatter": (1, 20, 0)}


SLICED = "collective-permute-start(%x.1), channel_id=1"


@pytest.mark.parametrize(
    ("before", "between", "passing", "waited"),
    [
        (0, 0, 60, 60),
        (0, 50, 60, 10),
        (70, 0, 60, 60),  # what was computed before it began
        (0, 70, 60, 0),
    ],
)
def test_collective_is_waited_for_as_long_as_it_takes_longer_than_what_is_computed_beside(
    before, between, passing, waited
):
    entry = f"""
  %x.1 = f32[3,5]{{1,0}} parameter(0)
  %cos.1 = f32[3,5]{{1,0}} cosine(%x.1), {before} cycles
  %start.1 = (f32[3,5], f32[3,5]) {SLICED}
  %copy.1 = (f32[3,5], f32[3,5]) copy-start(%x.1)
  %copied.1 = f32[3,5] copy-done(%copy.1)
  %tan.1 = f32[3,5]{{1,0}} tangent(%x.1), {between} cycles
  %done.1 = f32[3,5] collective-permute-done(%start.1)
"""
    found = estimate(entry, ring=2.0)
    assert (found.passing, found.waited) == (passing, waited)


def test_collectives_pass_one_after_the_other_and_with_the_turns_of_a_loop():
    started = "".join(f"\n  %s.{n} = (f32[3,5], f32[3,5]) {SLICED.replace('x.1', 'x.2')}" for n in (1, 2))
    ended = "".join(f"\n  %d.{n} = f32[3,5] collective-permute-done(%s.{n})" for n in (1, 2))
    now = "\n  %sum.1 = f32[3,5] all-reduce(%x.2), replica_groups={{0,1}}, to_apply=%add"
    body = replaced(BODY, STEP=1, END=13, DIRECTION="LT", TO="end").replace("7 cycles", "50 cycles")

    def waited(before="", after=""):
        turn = body.replace("\n  %tanh.1", f"{before}\n  %tanh.1").replace("\n  ROOT %t", f"{after}\n  ROOT %t")
        return estimate(replaced(LOOP, FIRST=0), turn, ring=2.0).waited / 13

    assert waited(started, ended) == 2 * 60 - 50
    assert waited(started + now, ended) == 2 * 60 + 30  # it waits for both before it
    assert waited(started, now + ended) == 2 * 60 - 50 + 30


@pytest.mark.parametrize(("pairs", "passing"), [("{0,1},{1,2},{2,0}", 120), ("{0,2},{1,0},{2,1}", 60)])
def test_both_directions_of_a_ring_are_used_at_once(pairs, passing):
    lines = [f"%s.{n} = (f32[3,5], f32[3,5]) {SLICED}, source_target_pairs={{" for n in (1, 2)]
    ended = "".join(f"\n  %d.{n} = f32[3,5] collective-permute-done(%s.{n})" for n in (1, 2))
    entry = f"%x.1 = f32[3,5] parameter(0)\n {lines[0]}{{0,1}},{{1,2}},{{2,0}}}}\n {lines[1]}{pairs}}}{ended}"
    found = estimate(entry, ring=2.0)
    assert found.passing == found.waited == passing
