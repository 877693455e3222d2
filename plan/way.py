"""The way from the policy to the engine: where LoRA is merged, and which experts trainer and engine share.

The plan, the dry run and the push (weight_sync.py) use the same object. Nothing here imports torch.
"""

from knobs import Config, Merging
from plan.grid import RankGrid


class Way:
    """The part of the way that follows from configuration, layout and device; weight_sync.py adds how it sends."""

    def __init__(self, cfg: Config, layout: RankGrid, device: str) -> None:
        self.cfg, self.layout, self.device = cfg, layout, device

    @property
    def splits_as_trainer(self) -> bool:
        """Return whether the engine's ranks split the experts as the trainer's do: a rank has the same ones in both."""
        return self.layout.engine_expert == self.layout.expert

    @property
    def fills_stacks(self) -> bool:
        """Return whether a push fills Engine.stacks on every rank: with all experts, or with exactly the trainer's.

        All ranks get the same answer. If the engine's ranks split the experts in another way than the trainer's, or if
        they split each expert, some rank's experts are on another rank.
        """
        rollout, several = self.cfg.rollout, self.layout.engine_expert > 1
        packs = self.device in rollout.kind.packs_on
        splits_each = several and not (rollout.expert_parallel or self.cfg.has_whole_experts(self.device))
        return not packs and not splits_each and (not several or self.splits_as_trainer)

    def merges(self, adapted: bool) -> bool:
        """Return whether a push merges LoRA into experts. ``adapted`` says whether LoRA is on them."""
        return adapted and self.cfg.merging > Merging.NOWHERE

    def shares(self, adapted: bool) -> bool:
        """Return whether trainer and engine share one copy of the experts, in the engine's memory.

        ``adapted`` says whether LoRA is on them. Merged experts are shared if the trainer computes with the weights
        that sample. Experts that are pushed unchanged can be shared unless the trainer stores them quantised.
        """
        if not self.fills_stacks:
            return False
        if self.merges(adapted):
            return self.cfg.merging is Merging.ONCE
        return self.cfg.model.quantisation == "none"
