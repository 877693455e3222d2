"""The device of one rank: its data sheet, and the share of its peak that software reaches. Imports no torch.

This share is a median of published figures, or it comes from your own run (plan/calibrate.py). A device with neither
counts as having no overhead, so its estimate is a plain roofline.
"""

from dataclasses import dataclass
from typing import NamedTuple

# Calls that reach the device in one layer, including those of embedding and head. `preflight.py configs/qwen3.yaml
# --dry-run` counts them on 16 ranks. More experts on a rank change nothing until a stack of them is merged in parts.
FORWARD_LAUNCHES = 64  # for a forward pass with frozen weights: 3,073 calls in 48 layers
MERGE_LAUNCHES = 4  # more calls for each matrix that a pass merges: a product, a scaling, a sum and a cast
UPDATE_LAUNCHES = {True: (79, 179), False: (99, 97)}  # model.recompute -> calls in an update's passes, without merges

SPREAD = 1.5  # chosen so that few published steps are outside the range (tests/rooms/plan/test_preflight.py)


class Range(NamedTuple):
    """The shortest and the longest time, in seconds, that the published runs make likely."""

    low: float
    high: float

    def __str__(self) -> str:
        return " to ".join(map(three_digits, self))


def three_digits(value: float) -> str:
    """Format a number with three digits: 0.123, 12.3 and 1,230, never 1.23e+03."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(expected: float) -> Range:
    """Return the range from ``expected`` / SPREAD to ``expected`` x SPREAD."""
    return Range(expected / SPREAD, expected * SPREAD)


@dataclass(frozen=True)
class Hardware:
    """The properties of one rank's device. Shares are fractions of the peak."""

    memory_gib: float  # 0: the ranks share the main memory of the host
    flops: float  # per second, in the model's dtype
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second to other ranks of its node
    between_nodes: float  # bytes per second to ranks of other nodes
    link_share: float = 0.5  # sgl-kernel-npu's README: 102 GB/s of 196 in an exchange of experts' rows on a 910C
    training_share: float = 1.0  # share of flops, in training and prefill
    graph_layer_seconds: float = 0.0  # least time of a layer in a decode step with a graph
    eager_layer_seconds: float = 0.0  # the same without a graph, when the host launches every kernel

    @property
    def launch_seconds(self) -> float:
        """The time in seconds in which the host launches one kernel.

        A layer of a decode step is assumed to have as many launches as a layer of a forward pass.
        """
        return self.eager_layer_seconds / FORWARD_LAUNCHES

    def sends(self, size: float, away: float) -> float:
        """Return the time in seconds to send ``size`` bytes.

        The share ``away`` of them goes to other nodes, and at the same time the rest goes over the link in the node.
        """
        return max(size * (1 - away) / self.link, size * away / self.between_nodes)


# Medians of published figures. tests/support/published_runs.json has each figure with its source and the assumptions
# about it. tests/rooms/plan/test_preflight.py computes the medians again, and compares each run with those of the
# others.
TRAINING_SHARE = 0.04649  # of the peak, exchange and launches included; from 6 runs and 5 shares of models with experts

HARDWARE = {
    # 910C: half of a package's 752 TFLOP/s, 3.2 TB/s and 392 GB/s; the division of the link by dies is a guess. Between
    # nodes a 910C has 400 Gbit/s of RDMA, a die half of it (arXiv 2506.12708); in a SuperPoD it would be the link.
    "npu": Hardware(
        memory_gib=61,
        flops=376e12,
        bandwidth=1.6e12,
        link=196e9,
        between_nodes=25e9,
        training_share=TRAINING_SHARE,
        graph_layer_seconds=6.203e-4,  # verl-ascend-recipe pulls 92, 97, vllm-plugin-FL pull 349, vllm-ascend 4656
        eager_layer_seconds=4.121e-3,  # verl-ascend-recipe lora_rl_merge, vllm-plugin-FL pull 349
    ),
    # The data sheet of an H100 SXM; 400 Gbit/s per GPU in a DGX.
    "cuda": Hardware(
        memory_gib=80,
        flops=989e12,
        bandwidth=3.35e12,
        link=450e9,
        between_nodes=50e9,
        training_share=TRAINING_SHARE,
        graph_layer_seconds=2.044e-4,  # vllm issue 45709 on a 4090D, tt-inference-server issue 340 on an A100
        eager_layer_seconds=7.067e-4,  # vllm issue 45709 on a 4090D
    ),
    "cpu": Hardware(0, 100e9, 13e9, 2e9, 2e9, training_share=0.5),  # one core of a server, fp32; guesses
}
