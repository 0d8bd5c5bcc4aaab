"""What the SuperOffload paper reports (arXiv 2509.21271), not sojax."""

from collections.abc import Mapping

ABLATION: Mapping[str, float] = {
  "GraceAdam": 0.104,
  "superchip-aware casting": 0.127,
  "speculation, then validation": 0.45,
  "bucket repartitioning": 0.141,
}
"""Gains in throughput, each over the row before; the first over ZeRO-Offload.
GPT of 5B on one GH200."""

ABLATION_TOTAL = 2.06
"""Throughput with all of them over ZeRO-Offload's."""

ABLATION_TFLOPS = (116.2, 128.2, 144.5, 209.4, 238.9)
"""The same in TFLOPS, as remembered; the gains are the sure part."""

ADAM_S: Mapping[str, Mapping[float, float]] = {
  "PyTorch": {1e9: 0.289, 2e9: 0.531, 4e9: 0.958, 8e9: 1.834},
  "DeepSpeed": {1e9: 0.098, 2e9: 0.198, 4e9: 0.393, 8e9: 0.769},
  "GraceAdam": {1e9: 0.082, 2e9: 0.160, 4e9: 0.316, 8e9: 0.608},
}
"""Seconds of an Adam step on a Grace, by parameters."""

OVER_ZERO_OFFLOAD = {"most": 2.5, "mean": 2.0}
"""Throughput over ZeRO-Offload's on one GH200: at most; on average, about."""

OVER_OTHERS = {"PyTorch DDP on 1": 1.67, "ZeRO-3 on 4 and 16": 1.37}
"""Throughput over systems without offloading, at most."""

LARGEST: Mapping[tuple[str, int], float] = {
  ("all on device", 1): 3.5,
  ("ZeRO-Offload", 1): 15,
  ("SuperOffload", 1): 25,
  ("SuperOffload", 4): 50,
  ("SuperOffload", 16): 200,
}
"""Billions of parameters of the largest model, by system and GH200s."""

SEQUENCE = {"model": "13b", "tokens": 1 << 20, "ranks": 8, "mfu": 0.55}
"""The longest sequence, with Ulysses; eight times that of Ulysses alone."""

SEQUENCE_OVER_ULYSSES = 8.0
