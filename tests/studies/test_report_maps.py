"""The maps of attention in a report: which are shown, where, and what is written at them."""

import shutil

import numpy as np
import pytest
import study_folder

from experiments.engine import figures
from experiments.studies import maps, runs, styles


@pytest.fixture
def drawn(monkeypatch):
    """The figures as they were handed over for writing, which none is."""
    handed = []
    monkeypatch.setattr(figures, "write", lambda drawing, path: handed.append(drawing))
    return handed


def test_maps_stand_side_by_side_on_one_scale(tmp_path, drawn):
    study = study_folder.study(seeds=(0, 1))
    study_folder.whole(tmp_path, study, M=5, H=3)
    shutil.copy(tmp_path / "all/tied/seed_0/maps.npz", tmp_path / "all/tied/seed_1/maps.npz")
    found = maps.first(runs.load(tmp_path, study))
    assert found["tied"].seed == 0
    assert set(found) == {"tied", "asymmetric"} and found["tied"].tokens == list("atomic<")
    maps.side_by_side("", found=found, style=styles.of(study))
    panels = np.reshape(drawn[0].axes[:-1], (2, 8))  # the last is the colour bar
    shown = [words for panel in panels[0] for words in [panel.get_title()]]
    assert shown == [f"layer {m}, head {h}" for m in (1, 2, 4, 5) for h in (1, 2)]
    np.testing.assert_array_equal(panels[1, 5].images[0].get_array(), found["asymmetric"].A_MHNS[3, 1])
    assert len({panel.images[0].norm for panel in panels.flat}) == 1
    words = [label.get_text() for label in panels[1, 0].get_xticklabels()]
    assert words == list("atomic<") == [label.get_text() for label in panels[0, 0].get_yticklabels()]
    assert not panels[1, 1].get_yticklabels() and panels[1, 1].get_xticklabels()
    assert maps.columns(1, 12) == [(0, h) for h in range(8)] and len(maps.columns(12, 16)) == 8


def test_a_map_of_all_heads_is_named_so_and_stands_at_its_layer(drawn):
    one, two = np.full((2, 1, 3, 3), 0.1), np.full((2, 2, 3, 3), 0.2)
    found = {arm: maps.Maps(A_MHNS, [], 0) for arm, A_MHNS in (("none", one), ("tied", two), ("asymmetric", two))}
    maps.side_by_side("", found=found, style=styles.of(study_folder.study(tuple(found))))
    panels = np.reshape(drawn[0].axes[:-1], (3, 4))
    titles = [[panel.get_title() for panel in row] for row in panels]
    heads = [f"layer {m}, head {h}" for m in (1, 2) for h in (1, 2)]
    assert titles == [["layer 1, all heads", "", "layer 2, all heads", ""], heads, [""] * 4]
    assert [panel.axison for panel in panels[0]] == [True, False, True, False]
    assert not panels[1, 0].get_xticklabels()


def test_maps_of_other_layers_have_titles_of_their_own(drawn):
    found = {arm: maps.Maps(np.full((M, 1, 3, 3), 0.1), [], 0) for arm, M in (("tied", 2), ("asymmetric", 9))}
    maps.side_by_side("", found=found, style=styles.of(study_folder.study()))
    panels = np.reshape(drawn[0].axes[:-1], (2, 4))
    titles = [[panel.get_title() for panel in row] for row in panels]
    assert titles == [["layer 1, head 1", "layer 2, head 1", "", ""], ["", *(f"layer {m}, head 1" for m in (4, 6, 9))]]
