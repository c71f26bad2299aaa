"""How much direction does attention need on text? U'U plus a skew form of rank r, on Shakespeare; ten seeds.

python launch.py --config configs/qk_skew_text.py --workdir runs/qk_skew_text
As qk_positions.py, with ranks 0 to 32 (r = 0 is `tied`; a head has 32 features, so the rank of two matrices is at
most 64) and two kinds of positions.
"""

from configs import qk_positions

RANKS = [0, 2, 4, 8, 16, 32]


def get_config():
    config = qk_positions.get_config()
    config.study.arms = [(f"skew_{r}", {"model.score": f"sym_plus_skew:{r}"}) for r in RANKS]
    config.study.arms += [("asymmetric", {"model.score": "asymmetric"})]
    config.study.conditions = [(name, qk_positions.POSITIONS[name]) for name in ("learned", "rotary")]
    return config
