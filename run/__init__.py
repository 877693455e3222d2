"""What surrounds the loop: the last check of the input, the opening, the sampler, the tripwires, and how a run ends."""
