"""Decides how the policy gets to the engine: where LoRA is merged, and which experts trainer and engine share.

The plan, the dry run and the push (weight_sync.py) use the same class. Nothing here imports torch.
"""

from knobs import Config, Merging
from plan.grid import RankGrid


class Way:
    """The decisions that follow from configuration, layout and device.

    The subclass in weight_sync.py sends the tensors.
    """

    def __init__(self, cfg: Config, layout: RankGrid, device: str) -> None:
        self.cfg, self.layout, self.device = cfg, layout, device

    @property
    def splits_as_trainer(self) -> bool:
        """Whether the engine splits the experts like the trainer, so that each rank has the same experts in both."""
        return self.layout.engine_expert == self.layout.expert

    @property
    def fills_stacks(self) -> bool:
        """Whether a push fills Engine.stacks on every rank, either with all experts or with the trainer's experts.

        The answer is the same on all ranks. It is false if the engine packs its experts, splits each expert, or splits
        the experts in another way than the trainer. In the last two cases, some rank's experts are on another rank.
        """
        rollout, several = self.cfg.rollout, self.layout.engine_expert > 1
        packs = self.device in rollout.kind.packs_on
        splits_each = several and not (rollout.expert_parallel or self.cfg.has_whole_experts(self.device))
        return not packs and not splits_each and (not several or self.splits_as_trainer)

    def merges(self, adapted: bool) -> bool:
        """Return whether a push merges LoRA into experts. ``adapted`` says whether LoRA adapts these experts."""
        return adapted and self.cfg.merging > Merging.NOWHERE

    def shares(self, adapted: bool) -> bool:
        """Return whether trainer and engine share one copy of the experts, in the engine's memory.

        ``adapted`` says whether LoRA adapts them. Merged experts are shared if the trainer computes with the same
        weights as the engine. Experts that are pushed unchanged are shared unless the trainer stores them quantised.
        """
        if not self.fills_stacks:
            return False
        if self.merges(adapted):
            return self.cfg.merging is Merging.ONCE
        return self.cfg.model.quantisation == "none"
