"""How much direction does attention need on text? Scores U'U plus a skew form of rank r, on Shakespeare; ten seeds.

python launch.py --config configs/qk_skew_text.py --workdir runs/qk_skew_text
The model and training are those of qk_positions.py, with two kinds of positions. r = 0 is `tied`. A head has 32
features, so the skew part of two matrices has at most rank 64. 308 runs, 168 of them to choose rates. Nats more than
two matrices, for r = 0 to 32: +0.295, +0.279, +0.255, +0.229, +0.206, +0.178 with learned positions, +0.141, +0.161,
+0.158, +0.155, +0.148, +0.137 with rotary ones (docs/study_results.md).
"""

from configs import qk_positions

RANKS = [0, 2, 4, 8, 16, 32]


def get_config():
    config = qk_positions.get_config()
    config.study.arms = [(f"skew_{r}", {"model.score": f"sym_plus_skew:{r}"}) for r in RANKS]
    config.study.arms += [("asymmetric", {"model.score": "asymmetric"})]
    config.study.conditions = [(name, qk_positions.POSITIONS[name]) for name in ("learned", "rotary")]
    return config
